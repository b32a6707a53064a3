"""Branches to samples, by the policy that the commit names. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Final

import numpy as np

from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.policy import Fate, SamplePolicy
from rollyard.schemas.sample import Commit, DriftPoint, Link, Sample, TurnSpan
from rollyard.stages.stitchers.forest import Forest, walk_to
from rollyard.stages.stitchers.graph import Turn
from rollyard.stages.stitchers.outcome import Counted, Outcome

VERSION: Final = "2"

_NEVER_HAD: Final = ("lost", "error", "aborted", "superseded", "dead", "no_intent", "broken")
_UNKNOWN_VERSION: Final = -1
_UNKNOWN: Final = _UNKNOWN_VERSION.to_bytes(4, "little", signed=True)
_NAN: Final = np.array([np.nan], dtype="<f4").tobytes()


@dataclass(slots=True)
class _Branch:
    """A walk that becomes a sample: `limit` tokens of it, `trained` calls among its own."""

    walk: list[Turn]
    limit: int
    cut: int
    trained: frozenset[str]


def assemble(forest: Forest, commit: Commit, counted: Counted) -> Outcome:
    """The samples of a forest, one a branch, and what was left out."""
    excluded = Counter(turn.excluded for turn in forest.turns if turn.excluded is not None)
    fate = _fate(commit)
    chosen = [turn for turn in forest.turns if turn.excluded is None]
    wanted = [turn for turn in chosen if turn.intent.scenario in commit.policy.scenarios]
    excluded.update(
        f"scenario_{turn.intent.scenario}" for turn in chosen if turn.intent.scenario not in commit.policy.scenarios
    )
    branches: list[_Branch] = []
    if fate == "drop":
        excluded[commit.status] += len(wanted)
    else:
        branches = _branches(wanted, commit, excluded)
    rewards, surplus = _turn_rewards(forest.turns, counted.turn_rewards)
    if surplus:
        excluded["turn_reward_without_call"] = surplus
    maker = _Maker(forest, commit, counted, rewards, masked=commit.status if fate == "mask" else "")
    samples = tuple(maker.sample(branch, index, len(branches)) for index, branch in enumerate(branches))
    drift: Counter[str] = Counter(each.reason for each in forest.drift)
    return Outcome(samples, _positive(excluded), dict(drift), dict(forest.lenience))


def _positive(counts: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count > 0}


def _fate(commit: Commit) -> Fate:
    fates: dict[str, Fate] = {
        "completed": "keep",
        "truncated": commit.policy.truncated,
        "failed": commit.policy.failed,
    }
    return fates.get(commit.status, "drop")


@lru_cache(maxsize=64)
def _digest(policy: SamplePolicy) -> str:
    return policy.digest()


# --- which branches, and which calls each trains ---


def _branches(wanted: Sequence[Turn], commit: Commit, excluded: Counter[str]) -> list[_Branch]:
    """Each call is trained in the first branch that holds it. Branches that are too long go before that is settled."""
    policy = commit.policy
    reasons: dict[str, str] = {}
    done: set[str] = set()
    branches: list[_Branch] = []
    allowed = {turn.call_id for turn in wanted}
    # What the main agent shares with others is trained, and rewarded, as its own.
    for walk in sorted(_walks(wanted), key=lambda walk: walk[-1].intent.scenario == "sub_agent"):
        size = walk[-1].tip.depth
        limit = min(size, policy.max_tokens or size)
        if limit < size and policy.too_long == "drop":
            reasons |= {turn.call_id: "too_long" for turn in walk if turn.call_id in allowed}
            continue
        reach = [turn for turn in walk if turn.prompt.depth < limit]
        # A prompt behind the last reply that is reached would be context for nothing.
        limit = min(limit, reach[-1].tip.depth) if reach else 0
        fresh = [turn for turn in reach if turn.call_id in allowed and turn.call_id not in done]
        beyond = {turn.call_id: "cut" for turn in walk[len(reach) :] if turn.call_id in allowed}
        reasons |= {call_id: why for call_id, why in beyond.items() if call_id not in reasons}
        if sum(min(limit, turn.tip.depth) - turn.prompt.depth for turn in fresh) < policy.min_trained_tokens:
            why = "cut" if not fresh else "too_few_tokens"
            reasons |= {turn.call_id: why for turn in fresh}
            continue
        done.update(turn.call_id for turn in fresh)
        branches.append(_Branch(reach, limit, size - limit, frozenset(turn.call_id for turn in fresh)))
    excluded.update(why for call_id, why in reasons.items() if call_id not in done)
    return branches


def _walks(wanted: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The walks that end in a call that is wanted and that no wanted one continues, depth first."""
    inner: set[str] = set()
    roots: list[Turn] = []
    for turn in wanted:
        below, above = turn, turn.parent
        while above is not None and above.call_id not in inner:
            inner.add(above.call_id)
            below, above = above, above.parent
        if above is None:
            roots.append(below)
    ends = {turn.call_id for turn in wanted} - inner
    on_the_way = inner | ends
    waiting = sorted(set(roots), key=attrgetter("seq"), reverse=True)
    while waiting:
        turn = waiting.pop()
        if turn.call_id in ends:
            yield walk_to(turn)
        else:
            waiting.extend([child for child in turn.children or () if child.call_id in on_the_way][::-1])


def _turn_rewards(turns: Iterable[Turn], given: Sequence[float | None]) -> tuple[dict[str, float], int]:
    """The rewards of the main agent's calls, by call, and how many were given for calls that are not there.

    The evaluation counts the replies that the agent had, whether they can be trained or not.
    """
    had = [turn for turn in turns if turn.excluded not in _NEVER_HAD] if given else []
    main = [turn.call_id for turn in had if turn.intent.scenario == "main"]
    rewards = {call_id: reward for call_id, reward in zip(main, given, strict=False) if reward is not None}
    return rewards, max(0, len(given) - len(main))


# --- samples ---


class _Maker:
    """Makes the samples of one rollout."""

    def __init__(
        self, forest: Forest, commit: Commit, counted: Counted, turn_rewards: dict[str, float], *, masked: str
    ) -> None:
        self._commit = commit
        self._counted = counted
        self._turn_rewards = turn_rewards
        self._masked = masked
        self._policy = _digest(commit.policy)
        self._drift: dict[str, DriftPoint] = {each.call_id: each for each in forest.drift}
        self._links: defaultdict[str, list[Link]] = defaultdict(list)
        for link in forest.links:
            self._links[link.call_id].append(link)
        lost = [forest.kin.get(turn.call_id) for turn in forest.turns if turn.end is None]
        self._unfinished = {kin.turn.call_id for kin in lost if kin is not None}

    def sample(self, branch: _Branch, index: int, total: int) -> Sample:
        """One branch as training data."""
        commit, walk = self._commit, branch.walk
        last = walk[-1]
        assert last.end is not None
        whole = not branch.cut
        ends = [turn.end for turn in walk if turn.call_id in branch.trained and turn.end is not None]
        kinds = {end.logprob_kind for end in ends}
        mask, logprobs, versions = self._columns(branch)
        size = branch.limit * TokenIds.itemsize
        messages = last.messages()
        if last.reply is not None:
            messages.append(last.reply)
        scenario = next(turn for turn in walk if turn.call_id in branch.trained).intent.scenario
        identity = (commit.rollout_id, str(commit.attempt), str(index), VERSION, self._policy)
        return Sample(
            sample_id="s" + subjects.digest(*identity),
            run=commit.run,
            task_id=commit.task_id,
            group_id=commit.group_id,
            rollout_id=commit.rollout_id,
            index=commit.index,
            attempt=commit.attempt,
            branch=index,
            branches=total,
            scenario=scenario,
            status=commit.status,
            token_ids=TokenIds(last.tip.ids()[:size]),
            loss_mask=LossMask(mask),
            logprobs=Logprobs(logprobs),
            policy_versions=Versions(versions),
            reward=self._reward(scenario, total),
            logprob_kind=kinds.pop() if len(kinds) == 1 else "unknown",
            messages=messages,
            tools=last.settings()[0],
            calls=tuple(turn.call_id for turn in walk),
            model=last.intent.model,
            params=last.intent.params,
            finish_reason=last.end.finish_reason if whole else None,
            timings=self._counted.timings,
            turns=self._turns(branch),
            links=tuple(link for turn in walk for link in self._links.get(turn.call_id, ())),
            drift=tuple(self._drift[turn.call_id] for turn in walk if turn.call_id in self._drift),
            rollout_reward=self._counted.reward,
            masked=self._masked,
            cut_tokens=branch.cut,
            incomplete=not self._unfinished.isdisjoint(turn.call_id for turn in walk),
            policy=self._policy,
            stitcher=VERSION,
            metadata=commit.metadata,
        )

    def _reward(self, scenario: str, total: int) -> float | None:
        reward, share = self._counted.reward, self._commit.policy.reward
        if reward is None or share == "all":
            return reward
        if share == "split":
            return reward / total
        return reward if scenario == "main" else None

    def _turns(self, branch: _Branch) -> tuple[TurnSpan, ...]:
        params = branch.walk[-1].intent.params
        return tuple(
            TurnSpan(
                start=turn.prompt.depth,
                end=min(turn.tip.depth, branch.limit),
                turn=index,
                call_id=turn.call_id,
                scenario=turn.intent.scenario,
                trained=not self._masked and turn.call_id in branch.trained,
                reward=self._turn_rewards.get(turn.call_id),
                params=None if turn.intent.params == params else turn.intent.params,
            )
            for index, turn in enumerate(branch.walk)
        )

    def _columns(self, branch: _Branch) -> tuple[bytes, bytes, bytes]:
        """What stands beside the ids, each of their length: loss mask, logprobs, policy versions."""
        mask: list[bytes] = []
        logprobs: list[bytes] = []
        versions: list[bytes] = []
        done = 0
        for turn in branch.walk:
            end, start, stop = turn.end, turn.prompt.depth, turn.tip.depth
            assert end is not None
            gap, size, done = start - done, stop - start, stop
            trained = turn.call_id in branch.trained and not self._masked
            mask += (bytes(gap), b"\1" * size if trained else bytes(size))
            # A trained id without a logprob is NaN: a number that is made up would pass for a real one.
            logprobs += (bytes(4 * gap), (end.logprobs.data or _NAN * size) if trained else bytes(4 * size))
            versions += (_UNKNOWN * gap, _versions(end, size))
        limit = branch.limit
        columns = b"".join(mask), b"".join(logprobs), b"".join(versions)
        return columns if done == limit else (columns[0][:limit], columns[1][: 4 * limit], columns[2][: 4 * limit])


def _versions(end: CallEnd, size: int) -> bytes:
    """The version of each sampled id: of its span, where the call has spans, else the one at dispatch.

    Of a call that saw an update and has no spans, that is the version that none of its ids is older than.
    """
    if not end.version_spans:
        return _version(end.policy_version) * size
    versions = bytearray(_version(end.policy_version) * size)
    for span in end.version_spans:
        first, last = (min(max(at, 0), size) for at in (span.start, span.end))
        if first < last:
            versions[4 * first : 4 * last] = _version(span.policy_version) * (last - first)
    return bytes(versions)


@lru_cache(maxsize=1024)
def _version(version: int | None) -> bytes:
    known = version is not None and 0 <= version < 1 << 31
    return (version if known and version is not None else _UNKNOWN_VERSION).to_bytes(4, "little", signed=True)
