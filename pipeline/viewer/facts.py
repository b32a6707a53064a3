"""What is said of a sample, a rollout, a call or a break beside its text, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from rollyard.pipeline.viewer.rollout import RolloutView
from rollyard.pipeline.viewer.text import TokenBytes, quoted, text_of
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.sample import STRUCTURAL, DriftPoint, Link, Sample

Facts = list[tuple[str, str]]
Name = Callable[[str], str]
"""A call's id to how it is called."""

_CALLS_SHOWN: Final = 4
_IDS_SHOWN: Final = 6
_ANSWER_CHARS: Final = 200
_ENDED: Final = {"truncated": "was truncated", "failed": "failed"}


def rollout_facts(view: RolloutView) -> Facts:
    """A rollout: where it belongs, how it ended, what became of its calls."""
    rows = [("rollout", view.rollout_id), ("run", view.run)]
    if view.samples:
        first = view.samples[0]
        rows.append(("group", f"{first.group_id}, rollout {first.index} of it, attempt {first.attempt}"))
    rows += [
        ("status", view.status),
        ("failure", view.failure),
        ("reward", number(view.reward)),
        ("rewards", ", ".join(f"{name} {value:g}" for name, value in view.rewards.items())),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in view.metrics.items())),
        ("answer", quoted(view.answer, _ANSWER_CHARS) if view.answer else ""),
        ("samples", _samples(view)),
        ("left out", counts(view.excluded)),
        ("lenience", counts(view.lenience)),
    ]
    return [(name, value) for name, value in rows if value]


def _samples(view: RolloutView) -> str:
    if not view.samples:
        return "none"
    trained = sum(sample.loss_mask.data.count(1) for sample in view.samples)
    tokens = sum(len(sample.token_ids) for sample in view.samples)
    used = len({call_id for sample in view.samples for call_id in sample.calls})
    calls = count_of(used, "call") if view.calls is None else f"{used:,} of {count_of(view.calls, 'call')}"
    return f"{len(view.samples)}, from {calls}; {trained:,} of {tokens:,} tokens are trained"


def sample_facts(sample: Sample, *, alone: bool = False) -> Facts:
    """A sample. `alone`: with what a drawing of its rollout would tell."""
    rows = [("sample", sample.sample_id)]
    if alone:
        place = f"{sample.index} of group {sample.group_id}, attempt {sample.attempt}"
        rows += [("rollout", f"{sample.rollout_id}, {place}"), ("run", sample.run)]
    rows += [
        ("branch", f"{sample.branch + 1} of {sample.branches}, {sample.scenario}, {_calls(sample, alone)}"),
        ("status", sample.status),
        ("reward", _reward(sample)),
        ("turns", _turn_rewards(sample)),
        ("policy", _versions(sample)),
        ("logprob", _logprob(sample)),
    ]
    if sample.masked:
        rows.append(("masked", f"no token of it is trained: the rollout {_ENDED.get(sample.masked, sample.masked)}"))
    if sample.cut_tokens:
        rows.append(("cut", f"{sample.cut_tokens:,} tokens are left out at its end, by max_tokens"))
    if sample.incomplete:
        rows.append(("open", "a call that continued it has no result in the log: it may be longer"))
    if alone:
        rows += [("link", link_words(link, str)) for link in sample.links]
        rows += [("drift", break_words(point, str)) for point in sample.drift]
    return [(name, value) for name, value in rows if value]


def branch_words(sample: Sample) -> str:
    """A branch on one line."""
    marks = [f"{sample.loss_mask.data.count(1):,} of {len(sample.token_ids):,} tokens trained"]
    marks.append(f"reward {_reward(sample)}")
    if sample.masked:
        marks.append(f"masked: {sample.masked}")
    if sample.cut_tokens:
        marks.append(f"cut by {sample.cut_tokens:,} tokens")
    if sample.incomplete:
        marks.append("incomplete")
    return f"branch {sample.branch + 1} of {sample.branches}: {', '.join(marks)}"


def link_words(link: Link, name: Name) -> str:
    """A link, from the later call."""
    return f"{link.kind} of {name(link.to)}"


def break_words(point: DriftPoint, name: Name) -> str:
    """A break, from the call that makes it, without the tokens."""
    if point.continues is None:
        return point.reason
    called = name(point.continues)
    how = f" of {called}: leaves its tokens" if point.reason in STRUCTURAL else f": leaves the tokens of {called}"
    place = "" if point.message is None else f", in message {point.message}"
    return f"{point.reason}{how} at {point.position:,}{place}"


def sides(point: DriftPoint, token_bytes: TokenBytes | None) -> tuple[str, str]:
    """What stands at a break in the earlier and in the later call; with the ids where the text tells no difference."""
    both = point.expected, point.found
    if token_bytes is None:
        return _side(both[0], None), _side(both[1], None)
    texts = [text_of(ids, token_bytes) for ids in both]
    alike = texts[0].startswith(texts[1]) or texts[1].startswith(texts[0])
    expected, found = (
        f"{_side(ids, token_bytes)}{f', ids {_some_ids(ids)}' if alike and len(ids) else ''}" for ids in both
    )
    return expected, found


def _side(ids: TokenIds, token_bytes: TokenBytes | None) -> str:
    if not ids:
        return "(nothing)"
    return quoted(text_of(ids, token_bytes), limit=160) if token_bytes else " ".join(map(str, ids))


def _some_ids(ids: TokenIds) -> str:
    return " ".join(map(str, ids[:_IDS_SHOWN])) + (" ..." if len(ids) > _IDS_SHOWN else "")


def number(value: float | None) -> str:
    """A reward; a missing one is not 0."""
    return "none" if value is None else f"{value:g}"


def counts(found: Mapping[str, int]) -> str:
    """Counts by name, most first."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(found.items(), key=lambda each: (-each[1], each[0])))


def count_of(value: int, noun: str) -> str:
    """A number of things."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def _calls(sample: Sample, named: bool) -> str:
    count = count_of(len(sample.calls), "call")
    if not named:
        return count
    shown = [*sample.calls[:_CALLS_SHOWN], *(["..."] if len(sample.calls) > _CALLS_SHOWN else [])]
    return f"{count} {', '.join(shown)}".rstrip()


def _reward(sample: Sample) -> str:
    whole = sample.rollout_reward
    if whole is None or whole == sample.reward:
        return number(sample.reward)
    return f"{number(sample.reward)} of the rollout's {number(whole)}"


def _turn_rewards(sample: Sample) -> str:
    rewards = [turn.reward for turn in sample.turns]
    if not any(reward is not None for reward in rewards):
        return ""
    return f"{len(rewards)}, with rewards {', '.join(map(number, rewards))}"


def _versions(sample: Sample) -> str:
    mask = np.asarray(sample.loss_mask).astype(bool)
    found = sorted({int(version) for version in np.asarray(sample.policy_versions)[mask]})
    return ", ".join("unknown" if version < 0 else str(version) for version in found)


def _logprob(sample: Sample) -> str:
    known = np.asarray(sample.logprobs)[np.asarray(sample.loss_mask).astype(bool)]
    known = known[~np.isnan(known)]
    return f"mean {known.mean():.3f} over trained tokens ({sample.logprob_kind})" if known.size else "none"
