"""What changes between two ways of making a rollout's samples. Pure.

Branches are matched by what they hold, never by their index: see `pairs_of`. Two ways that give the same samples in
another order or under other ids differ in nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta, Struct

from rollyard.schemas.packed import TokenIds
from rollyard.schemas.sample import Sample

ChangeKind = Literal["added", "removed", "trained_more", "trained_less", "tokens", "reward", "turn_rewards"]
KINDS: Final[tuple[ChangeKind, ...]] = (
    "added",
    "removed",
    "trained_more",
    "trained_less",
    "tokens",
    "reward",
    "turn_rewards",
)
Pair = tuple[Sample | None, Sample | None]


class Side(Struct, frozen=True, kw_only=True):
    """One sample, as far as a change tells of it."""

    sample_id: str
    branch: int
    tokens: Annotated[int, Meta(description="ids of the sample")]
    trained_tokens: Annotated[int, Meta(description="those whose loss mask is 1")]
    reward: float | None


class SampleChange(Struct, frozen=True, kw_only=True):
    """A branch that is not what it was."""

    rollout_id: str
    kinds: Annotated[
        tuple[ChangeKind, ...],
        Meta(
            description="added, removed; trained_more, trained_less: tokens that are trained now, or no more; tokens: "
            "other ids; reward; turn_rewards"
        ),
    ]
    before: Annotated[Side | None, Meta(description="null: added")]
    after: Annotated[Side | None, Meta(description="null: removed")]
    trained_more: Annotated[int, Meta(description="tokens trained after and not before")] = 0
    trained_less: Annotated[int, Meta(description="tokens trained before and not after")] = 0


class Totals(Struct, kw_only=True):
    """Counts of one way to make the samples, added up."""

    rollouts: int = 0
    samples: int = 0
    trained_tokens: int = 0
    rewarded: Annotated[int, Meta(description="rollouts with a reward")] = 0
    reward_sum: Annotated[float, Meta(description="of their rewards")] = 0.0

    def add(self, samples: Iterable[Sample], reward: float | None) -> None:
        """Count a rollout."""
        self.rollouts += 1
        for sample in samples:
            self.samples += 1
            self.trained_tokens += trained_tokens(sample)
        if reward is not None:
            self.rewarded += 1
            self.reward_sum += reward

    def mean_reward(self) -> float | None:
        """Over the rollouts that have one; None: none has."""
        return self.reward_sum / self.rewarded if self.rewarded else None


class KindTotal(Struct, kw_only=True):
    """How often a kind of change was seen."""

    samples: int = 0
    trained_tokens: Annotated[int, Meta(description="that are trained more (added, trained_more) or less")] = 0


@dataclass(slots=True)
class Diff:
    """Changes added up over rollouts, with the first `examples` of each kind."""

    examples: int = 10
    rollouts: int = 0
    changed: int = 0
    before: Totals = field(default_factory=Totals)
    after: Totals = field(default_factory=Totals)
    kinds: dict[ChangeKind, KindTotal] = field(default_factory=dict)
    shown: dict[ChangeKind, list[SampleChange]] = field(default_factory=dict)

    def add(self, changes: Sequence[SampleChange]) -> None:
        """Count the changes of one rollout."""
        self.rollouts += 1
        self.changed += bool(changes)
        for change in changes:
            for kind in change.kinds:
                total = self.kinds.setdefault(kind, KindTotal())
                total.samples += 1
                total.trained_tokens += _tokens_of(change, kind)
                shown = self.shown.setdefault(kind, [])
                if len(shown) < self.examples:
                    shown.append(change)


def _tokens_of(change: SampleChange, kind: ChangeKind) -> int:
    if kind in ("added", "trained_more"):
        return change.trained_more
    return change.trained_less if kind in ("removed", "trained_less") else 0


def trained_tokens(sample: Sample) -> int:
    """How many tokens of a sample are trained."""
    return sample.loss_mask.data.count(1)


def changes_of(before: Sequence[Sample], after: Sequence[Sample]) -> list[SampleChange]:
    """What is different between two sets of samples of one rollout; empty when nothing is."""
    changes = (_change(old, new) for old, new in pairs_of(before, after))
    return [change for change in changes if change is not None]


def _change(old: Sample | None, new: Sample | None) -> SampleChange | None:
    if old is None or new is None:
        there = new or old
        assert there is not None
        trained = trained_tokens(there)
        return SampleChange(
            rollout_id=there.rollout_id,
            kinds=("added",) if old is None else ("removed",),
            before=_side(old),
            after=_side(new),
            trained_more=trained if old is None else 0,
            trained_less=trained if new is None else 0,
        )
    more, less = _moved(old, new)
    found: dict[ChangeKind, bool] = {
        "trained_more": more > 0,
        "trained_less": less > 0,
        "tokens": old.token_ids != new.token_ids,
        "reward": _reward(old.reward) != _reward(new.reward),
        "turn_rewards": _turn_rewards(old) != _turn_rewards(new),
    }
    kinds = tuple(kind for kind in KINDS if found.get(kind))
    if not kinds:
        return None
    return SampleChange(
        rollout_id=old.rollout_id,
        kinds=kinds,
        before=_side(old),
        after=_side(new),
        trained_more=more,
        trained_less=less,
    )


def _side(sample: Sample | None) -> Side | None:
    if sample is None:
        return None
    return Side(
        sample_id=sample.sample_id,
        branch=sample.branch,
        tokens=len(sample.token_ids),
        trained_tokens=trained_tokens(sample),
        reward=sample.reward,
    )


def _moved(old: Sample, new: Sample) -> tuple[int, int]:
    """(Tokens that only `new` trains, tokens that only `old` trains); one that is another id is another token."""
    kept = _kept(old, new)
    return trained_tokens(new) - kept, trained_tokens(old) - kept


def _kept(old: Sample, new: Sample) -> int:
    """How many tokens both train, among the leading ones that are equal."""
    same = _common_tokens(old.token_ids, new.token_ids)
    was, now = (np.frombuffer(each.loss_mask.data, "<u1", same) for each in (old, new))
    return int(np.count_nonzero(was & now))


def _common_tokens(left: TokenIds, right: TokenIds) -> int:
    """How many leading ids are equal."""
    size = min(len(left), len(right))
    differs = np.frombuffer(left.data, "<u4", size) != np.frombuffer(right.data, "<u4", size)
    return int(differs.argmax()) if differs.any() else size


def _reward(reward: float | None) -> float | str | None:
    return "nan" if reward is not None and math.isnan(reward) else reward


def _turn_rewards(sample: Sample) -> tuple[tuple[str, float | str | None], ...]:
    return tuple((turn.call_id, _reward(turn.reward)) for turn in sample.turns if turn.reward is not None)


# --- which branch is which ---


def _everything(sample: Sample) -> Hashable:
    return (sample.calls, sample.token_ids, sample.loss_mask, _reward(sample.reward), _turn_rewards(sample))


_ALIKE: Final[tuple[Callable[[Sample], Hashable], ...]] = (
    _everything,
    lambda sample: (sample.calls, sample.token_ids),
    lambda sample: sample.calls or None,
    lambda sample: sample.token_ids if sample.token_ids else None,
)
"""What two branches may have in common, best first; None: nothing."""


def pairs_of(before: Sequence[Sample], after: Sequence[Sample]) -> list[Pair]:
    """Each sample once, with its counterpart on the other side or None.

    Counterparts are, in this order: branches that are equal in all that is compared; of the same calls and ids; of the
    same calls; of the same ids; of calls of which one side has all that the other has, or both more than half, most
    first. The order of the samples decides nothing.
    """
    left, right = sorted(before, key=_order), sorted(after, key=_order)
    matches = _Matches(left, right)
    for key in _ALIKE:
        matches.take_alike(key)
    matches.take_overlapping()
    both: list[Pair] = [(left[i], right[j]) for i, j in matches.found]
    gone: list[Pair] = [(left[i], None) for i in matches.open_left]
    new: list[Pair] = [(None, right[j]) for j in matches.open_right]
    return both + gone + new


def _order(sample: Sample) -> tuple[object, ...]:
    """A total order by content, so that the samples' own order does not count."""
    reward = (0, 0.0) if sample.reward is None or math.isnan(sample.reward) else (1, sample.reward)
    return (sample.calls, sample.token_ids.data, sample.loss_mask.data, reward, repr(_turn_rewards(sample)))


class _Matches:
    """Pairs found so far, by position, and what is still without a counterpart. Both sides are treated the same."""

    def __init__(self, left: Sequence[Sample], right: Sequence[Sample]) -> None:
        self._left = left
        self._right = right
        self.open_left = list(range(len(left)))
        self.open_right = list(range(len(right)))
        self.found: list[tuple[int, int]] = []

    def take_alike(self, key: Callable[[Sample], Hashable]) -> None:
        """Match what has the same key, the first of one side with the first of the other."""
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for j in self.open_right:
            waiting[key(self._right[j])].append(j)
        waiting.pop(None, None)
        self._take((i, same.popleft()) for i in self.open_left if (same := waiting.get(key(self._left[i]))))

    def take_overlapping(self) -> None:
        """Match what shares enough calls: first those with the most, of these those with the most leading ids, of these
        those with the most tokens that both train.

        Of equals the first of one side goes to the first of the other, which is the same seen from both sides.
        """
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for j in self.open_right:
            for call in set(self._right[j].calls):
                holders[call].append(j)
        shared = Counter((i, j) for i in self.open_left for call in set(self._left[i].calls) for j in holders[call])
        ranked = []
        for (i, j), calls in shared.items():
            old, new = self._left[i], self._right[j]
            sizes = len(set(old.calls)), len(set(new.calls))
            if calls == min(sizes) or 2 * calls > max(sizes):
                ranked.append((-calls, -_common_tokens(old.token_ids, new.token_ids), -_kept(old, new), i, j))
        used: tuple[set[int], set[int]] = set(), set()
        best = []
        for *_, i, j in sorted(ranked):
            if i not in used[0] and j not in used[1]:
                used[0].add(i)
                used[1].add(j)
                best.append((i, j))
        self._take(best)

    def _take(self, pairs: Iterable[tuple[int, int]]) -> None:
        taken = list(pairs)
        self.found += taken
        lefts, rights = {i for i, _ in taken}, {j for _, j in taken}
        self.open_left = [i for i in self.open_left if i not in lefts]
        self.open_right = [j for j in self.open_right if j not in rights]
