"""Version 1 of the stitcher, for the commits that name it. Pure: no I/O, no clock, no arrival order.

It knows tokens only: it trains every scenario and knows no policy. A call extends the call whose prompt and sampled
ids are exactly the start of its prompt ids; a trajectory is a walk from a root to a leaf of that tree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallRecord
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Commit, Sample, Timings
from rollyard.stages.calls import Event, full_ids, resolve
from rollyard.stages.stitchers.outcome import Outcome, counted

VERSION: Final = "1"

_UNKNOWN_VERSION: Final = -1
_NAN: Final = np.array([np.nan], dtype="<f4").tobytes()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One root-to-leaf chain of calls. `trained[i]`: whether `calls[i]` is trained here; else another one does it."""

    calls: tuple[CallRecord, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """A call whose prompt does not continue the ids of the call whose reply it holds."""

    call_id: str
    parent: str | None
    reason: str
    shared_ids: int
    """Leading prompt ids that are equal to the parent's ids."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A call whose sampled ids are not trained, and why: lost, error, aborted, superseded, untrainable, empty,
    bad_logprobs, nonfinite_logprobs, no_intent, broken or dead."""

    call_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stitched:
    """What became of a session's calls."""

    trajectories: tuple[Trajectory, ...]
    drift: tuple[Drift, ...]
    excluded: tuple[Excluded, ...]

    def excluded_counts(self) -> dict[str, int]:
        """How many calls were left out for each reason."""
        return dict(Counter(each.reason for each in self.excluded))

    def drift_counts(self) -> dict[str, int]:
        """How many calls did not continue their parent's ids, for each reason."""
        return dict(Counter(each.reason for each in self.drift))


# --- records to trajectories ---


def stitch(records: Sequence[CallRecord]) -> Stitched:
    """Arrange calls into trajectories, ordered by the sequence of their first call, then their second, and so on.

    Each sampled id is trained in exactly one trajectory, the first that holds it.
    """
    reasons = {record.intent.call_id: _why_not(record) for record in records}
    counted = sorted(
        (record for record in records if reasons[record.intent.call_id] is None), key=lambda record: record.intent_seq
    )
    parents = _token_parents(counted)
    dead = _dead_replies(records, counted, parents)
    reasons |= dict.fromkeys(dead, "dead")
    living = [record for record in counted if record.intent.call_id not in dead]
    excluded = [Excluded(call_id, reason) for call_id, reason in reasons.items() if reason is not None]
    return Stitched(
        trajectories=_walks(living, parents),
        drift=tuple(_drift(living, parents, {record.intent.call_id: record for record in records})),
        excluded=tuple(sorted(excluded, key=lambda each: each.call_id)),
    )


def _why_not(record: CallRecord) -> str | None:
    """Why the ids of a call cannot be trained, or None."""
    end = record.end
    if record.broken:
        return "broken" if record.intent_seq else "no_intent"
    if end is None:
        return "lost"
    if end.status != "ok":
        return end.status
    if end.untrainable:
        return "untrainable"
    if not end.completion_ids:
        return "empty"
    if len(end.logprobs) not in (0, len(end.completion_ids)):
        return "bad_logprobs"
    if not np.isfinite(np.asarray(end.logprobs)).all():
        return "nonfinite_logprobs"
    return None


def _token_parents(counted: Sequence[CallRecord]) -> dict[str, CallRecord]:
    """For each call the call with the longest ids that its prompt ids start with; of equals the parent it names.

    Sorted as bytes, everything that begins with X follows X directly: one pass with a stack of open prefixes finds the
    longest one, without comparing each with each.
    """
    owners: defaultdict[bytes, list[CallRecord]] = defaultdict(list)
    askers: defaultdict[bytes, list[CallRecord]] = defaultdict(list)
    for record in counted:
        owners[full_ids(record)].append(record)
        askers[record.prompt_ids.data].append(record)
    parents: dict[str, CallRecord] = {}
    open_prefixes: list[bytes] = []
    for ids in sorted(owners.keys() | askers.keys()):
        while open_prefixes and not ids.startswith(open_prefixes[-1]):
            open_prefixes.pop()
        if ids in owners:
            open_prefixes.append(ids)
        if open_prefixes:
            candidates = owners[open_prefixes[-1]]
            for record in askers.get(ids, ()):
                named = [each for each in candidates if each.intent.call_id == record.intent.parent]
                parents[record.intent.call_id] = (named or candidates)[0]
    return parents


def _dead_replies(
    records: Sequence[CallRecord], counted: Sequence[CallRecord], parents: Mapping[str, CallRecord]
) -> set[str]:
    """Replies that the agent never had: it asked the same again, and nothing continues them.

    Asked again means: another call with the same prompt ids started after this one ended, or started later and was
    continued.
    """
    continued = {record.intent.parent for record in records} | {each.intent.call_id for each in parents.values()}
    siblings: defaultdict[bytes, list[CallRecord]] = defaultdict(list)
    for record in counted:
        siblings[record.prompt_ids.data].append(record)
    dead: set[str] = set()
    for family in siblings.values():
        last_start = family[-1].intent_seq
        last_continued = max((each.intent_seq for each in family if each.intent.call_id in continued), default=0)
        for each in family:
            if each.intent.call_id not in continued and (each.end_seq < last_start or each.intent_seq < last_continued):
                dead.add(each.intent.call_id)
    return dead


def _walks(living: Sequence[CallRecord], parents: Mapping[str, CallRecord]) -> tuple[Trajectory, ...]:
    """Every walk from a root to a leaf, depth first, siblings in the order of their intents."""
    children: defaultdict[str, list[CallRecord]] = defaultdict(list)
    roots: list[CallRecord] = []
    for record in living:
        parent = parents.get(record.intent.call_id)
        (children[parent.intent.call_id] if parent else roots).append(record)
    walks: list[Trajectory] = []
    trained: set[str] = set()
    waiting = roots[::-1]
    while waiting:
        record = waiting.pop()
        below = children.get(record.intent.call_id)
        if below:
            waiting.extend(below[::-1])
            continue
        walk = [record]
        while (parent := parents.get(walk[-1].intent.call_id)) is not None:
            walk.append(parent)
        walk.reverse()
        ids = [each.intent.call_id for each in walk]
        walks.append(Trajectory(tuple(walk), tuple(call_id not in trained for call_id in ids)))
        trained.update(ids)
    return tuple(walks)


def _drift(
    living: Iterable[CallRecord], parents: Mapping[str, CallRecord], by_id: Mapping[str, CallRecord]
) -> Iterable[Drift]:
    for record in living:
        intent = record.intent
        named = by_id.get(intent.parent) if intent.parent is not None else None
        if intent.drift is None and (named is None or record.prompt_ids.data.startswith(full_ids(named))):
            continue
        shared = _common_items(record.prompt_ids.data, full_ids(named)) if named else 0
        yield Drift(intent.call_id, intent.parent, intent.drift or "unknown", shared)


def _common_items(left: bytes, right: bytes) -> int:
    """How many leading ids are equal."""
    size = min(len(left), len(right)) // TokenIds.itemsize
    differs = np.frombuffer(left, "<u4", size) != np.frombuffer(right, "<u4", size)
    return int(differs.argmax()) if differs.any() else size


# --- trajectories to samples ---


def outcome_of(events: Iterable[tuple[int, Event]], commit: Commit) -> Outcome:
    """What becomes of a rollout."""
    if commit.status not in ("completed", "truncated"):
        return Outcome()
    lets_in = counted(events, commit)
    stitched = stitch(resolve(lets_in.calls))
    samples = build_samples(stitched, commit, lets_in.reward, lets_in.timings)
    return Outcome(samples, stitched.excluded_counts(), stitched.drift_counts())


def build_samples(stitched: Stitched, commit: Commit, reward: float | None, timings: Timings) -> tuple[Sample, ...]:
    """One sample for each trajectory, in their order."""
    total = len(stitched.trajectories)
    return tuple(
        _sample(trajectory, commit, branch=branch, branches=total, reward=reward, timings=timings)
        for branch, trajectory in enumerate(stitched.trajectories)
    )


def _sample(
    trajectory: Trajectory, commit: Commit, *, branch: int, branches: int, reward: float | None, timings: Timings
) -> Sample:
    last = trajectory.calls[-1]
    assert last.end is not None
    trained = [call for call, is_trained in zip(trajectory.calls, trajectory.trained, strict=True) if is_trained]
    ends = [call.end for call in trained if call.end is not None]
    kinds = {end.logprob_kind for end in ends}
    newest = max(_newest_version(end) for end in ends)
    mask, logprobs, versions = _columns(trajectory)
    identity = (commit.rollout_id, str(commit.attempt), str(branch), VERSION, str(newest))
    return Sample(
        sample_id="s" + subjects.digest(*identity),
        run=commit.run,
        task_id=commit.task_id,
        group_id=commit.group_id,
        rollout_id=commit.rollout_id,
        index=commit.index,
        attempt=commit.attempt,
        branch=branch,
        branches=branches,
        scenario=trained[0].intent.scenario,
        status=commit.status,
        token_ids=TokenIds(full_ids(last)),
        loss_mask=mask,
        logprobs=logprobs,
        policy_versions=versions,
        reward=reward,
        logprob_kind=kinds.pop() if len(kinds) == 1 else "unknown",
        messages=[*last.messages, last.end.reply] if last.end.reply is not None else last.messages,
        tools=last.tools,
        calls=tuple(call.intent.call_id for call in trajectory.calls),
        model=last.intent.model,
        params=last.intent.params,
        finish_reason=last.end.finish_reason,
        timings=timings,
        stitcher=VERSION,
        metadata=commit.metadata,
    )


def _columns(trajectory: Trajectory) -> tuple[LossMask, Logprobs, Versions]:
    """What stands beside the ids of a trajectory's last prompt and reply, each of their length."""
    mask: list[bytes] = []
    logprobs: list[bytes] = []
    versions: list[bytes] = []
    unknown = _UNKNOWN_VERSION.to_bytes(4, "little", signed=True)
    done = 0
    for call, trained in zip(trajectory.calls, trajectory.trained, strict=True):
        assert call.end is not None
        gap, size = len(call.prompt_ids) - done, len(call.end.completion_ids)
        mask += (bytes(gap), (b"\1" if trained else b"\0") * size)
        # A trained id without a logprob is NaN: a number that is made up would pass for a real one.
        logprobs += (bytes(4 * gap), (call.end.logprobs.data or _NAN * size) if trained else bytes(4 * size))
        versions += (unknown * gap, _versions(call.end, size))
        done += gap + size
    return LossMask(b"".join(mask)), Logprobs(b"".join(logprobs)), Versions(b"".join(versions))


def _versions(end: CallEnd, size: int) -> bytes:
    """The version of each sampled id: of its span, where the call has spans, else the one at dispatch.

    Of a call that saw an update and has no spans, that is the version that none of its ids is older than.
    """
    versions = np.full(size, _version(end.policy_version), dtype="<i4")
    for span in end.version_spans:
        versions[span.start : span.end] = _version(span.policy_version)
    return versions.tobytes()


def _newest_version(end: CallEnd) -> int:
    return max([_version(end.policy_version), *(_version(span.policy_version) for span in end.version_spans)])


def _version(version: int | None) -> int:
    return version if version is not None and 0 <= version < 1 << 31 else _UNKNOWN_VERSION
