from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline.sample_diff import Diff, SampleChange, Totals, changes_of, pairs_of, trained_tokens
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Sample, TurnSpan


def sample(
    calls: Sequence[str], ids: Sequence[int], mask: Sequence[int], reward: float | None = 1.0, **changes: Any
) -> Sample:
    size = len(ids)
    return Sample(
        **{
            "sample_id": "s",
            "run": "run",
            "task_id": "task",
            "group_id": "task",
            "rollout_id": "r",
            "index": 0,
            "attempt": 1,
            "branch": 0,
            "branches": 1,
            "scenario": "main",
            "status": "completed",
            "token_ids": TokenIds.of(ids),
            "loss_mask": LossMask.of(mask),
            "logprobs": Logprobs.of([0.0] * size),
            "policy_versions": Versions.of([-1] * size),
            "reward": reward,
            "calls": tuple(calls),
        }
        | changes
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """A branch that often has calls and ids in common with another one."""
    calls = [f"c{number}" for number in range(draw(st.integers(0, 4)))]
    if draw(st.booleans()):
        calls = [*calls[:-1], draw(st.sampled_from(["x", "y"]))]
    ids = [*range(draw(st.integers(0, 4))), *draw(st.lists(st.integers(0, 2), max_size=2))]
    mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    reward = draw(st.sampled_from([None, 0.0, 1.0, float("nan")]))
    turns = draw(st.sampled_from([(), (TurnSpan(start=0, end=1, turn=0, call_id="c0", reward=0.5),)]))
    return sample(calls, ids, mask, reward, branch=draw(st.integers(0, 9)), turns=turns)


sets = st.lists(samples(), max_size=6)


def facts(changes: list[SampleChange]) -> list[str]:
    """Changes without the numbers of branches, in an order of their own."""
    return sorted(repr(_unnumbered(change)) for change in changes)


def _unnumbered(change: SampleChange) -> SampleChange:
    sides = {
        name: structs.replace(side, branch=0)
        for name in ("before", "after")
        if (side := getattr(change, name)) is not None
    }
    return structs.replace(change, **sides)


MIRROR = {"added": "removed", "removed": "added", "trained_more": "trained_less", "trained_less": "trained_more"}
KIND_ORDER = ["added", "removed", "trained_more", "trained_less", "tokens", "reward", "turn_rewards"]


def mirrored(change: SampleChange) -> SampleChange:
    kinds = sorted((MIRROR.get(kind, kind) for kind in change.kinds), key=KIND_ORDER.index)
    return SampleChange(
        rollout_id=change.rollout_id,
        kinds=tuple(kinds),  # type: ignore[arg-type]
        before=change.after,
        after=change.before,
        trained_more=change.trained_less,
        trained_less=change.trained_more,
    )


@given(sets, st.randoms(use_true_random=False))
def test_equal_sets_in_any_order_and_under_any_ids_differ_in_nothing(before: list[Sample], rng: Any) -> None:
    after = [structs.replace(each, sample_id=f"other{i}", branch=i) for i, each in enumerate(before)]
    rng.shuffle(after)
    assert changes_of(before, after) == []


@given(sets, sets)
def test_the_diff_mirrors_the_diff_of_the_other_way_round(before: list[Sample], after: list[Sample]) -> None:
    there = changes_of(before, after)
    back = changes_of(after, before)
    assert facts(there) == facts([mirrored(change) for change in back])


@given(sets, sets, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_decides_nothing(before: list[Sample], after: list[Sample], rng: Any) -> None:
    expected = facts(changes_of(before, after))
    rng.shuffle(before)
    rng.shuffle(after)
    assert facts(changes_of(before, after)) == expected


@given(sets, sets)
def test_every_sample_is_in_one_pair(before: list[Sample], after: list[Sample]) -> None:
    pairs = pairs_of(before, after)
    assert sorted(repr(old) for old, _ in pairs if old is not None) == sorted(map(repr, before))
    assert sorted(repr(new) for _, new in pairs if new is not None) == sorted(map(repr, after))


@given(st.lists(st.tuples(sets, sets), max_size=4))
def test_the_totals_add_up(rollouts: list[tuple[list[Sample], list[Sample]]]) -> None:
    diff = Diff(examples=2)
    for before, after in rollouts:
        diff.before.add(before, None)
        diff.after.add(after, 1.0)
        diff.add(changes_of(before, after))

    def count(kind: Any) -> tuple[int, int]:
        total = diff.kinds.get(kind)
        return (total.samples, total.trained_tokens) if total else (0, 0)

    added, removed = count("added"), count("removed")
    assert diff.after.samples == diff.before.samples + added[0] - removed[0]
    gained = added[1] + count("trained_more")[1] - removed[1] - count("trained_less")[1]
    assert diff.after.trained_tokens == diff.before.trained_tokens + gained
    assert diff.rollouts == diff.before.rollouts == diff.after.rollouts == len(rollouts)
    assert (diff.before.rewarded, diff.after.rewarded) == (0, len(rollouts))
    assert diff.after.mean_reward() == (1.0 if rollouts else None)
    assert all(len(shown) == min(2, diff.kinds[kind].samples) for kind, shown in diff.shown.items())


def only(before: list[Sample], after: list[Sample]) -> SampleChange:
    (change,) = changes_of(before, after)
    return change


def test_a_branch_is_known_by_its_calls_whatever_its_index() -> None:
    old = [sample(["a"], [1, 2], [0, 1], branch=0), sample(["b"], [5, 6, 7], [0, 1, 1], branch=1)]
    new = [sample(["b"], [5, 6], [0, 1], branch=0), sample(["a"], [1, 2], [0, 1], branch=1)]
    change = only(old, new)
    assert (change.kinds, change.trained_more, change.trained_less) == (("trained_less", "tokens"), 0, 1)
    assert change.before
    assert change.after
    assert (change.before.branch, change.after.branch) == (1, 0)
    assert (change.before.tokens, change.after.tokens) == (3, 2)
    assert (change.before.trained_tokens, change.after.trained_tokens) == (2, 1)


def test_a_branch_that_lost_its_last_call_is_the_same_branch() -> None:
    old = [sample(["a", "b", "title"], [1, 2, 3, 4], [0, 1, 1, 1]), sample(["c"], [9], [1])]
    new = [sample(["c"], [9], [1]), sample(["a", "b"], [1, 2, 3], [0, 1, 1])]
    assert only(old, new).kinds == ("trained_less", "tokens")


def test_branches_that_share_only_a_root_are_two() -> None:
    old = [sample(["a", "b", "c"], [1, 2, 3], [1, 1, 1])]
    new = [sample(["a", "x", "y"], [1, 5, 6], [1, 1, 1])]
    assert sorted(change.kinds for change in changes_of(old, new)) == [("added",), ("removed",)]


def test_of_two_that_share_calls_the_one_with_more_is_the_counterpart() -> None:
    old = [sample(["a", "b", "c", "d"], [1, 2, 3, 4], [1, 1, 1, 1])]
    new = [sample(["a"], [1], [1]), sample(["a", "b", "c"], [1, 2, 3], [1, 1, 1])]
    kinds = {change.kinds: change for change in changes_of(old, new)}
    assert set(kinds) == {("added",), ("trained_less", "tokens")}
    counterpart = kinds["trained_less", "tokens"].after
    assert counterpart
    assert counterpart.tokens == 3


def test_of_two_that_share_as_many_calls_the_one_with_more_of_the_ids_is_the_counterpart() -> None:
    old = [sample(["a", "b", "c"], [1, 2, 3], [1, 1, 1])]
    new = [sample(["a", "b", "d"], [1, 9, 9], [1, 1, 1]), sample(["a", "b", "x"], [1, 2, 9], [1, 1, 1])]
    for before, after in ((old, new), (new, old)):
        (whole,) = [change for change in changes_of(before, after) if len(change.kinds) > 1]
        assert (whole.trained_more, whole.trained_less) == (1, 1)


def test_samples_without_calls_are_known_by_their_ids() -> None:
    change = only([sample([], [1, 2], [1, 1])], [sample([], [1, 2], [0, 1])])
    assert (change.kinds, change.trained_less) == (("trained_less",), 1)
    assert sorted(each.kinds for each in changes_of([sample([], [1], [1])], [sample([], [2], [1])])) == [
        ("added",),
        ("removed",),
    ]


def test_a_token_that_became_another_one_is_trained_less_and_more() -> None:
    change = only([sample(["a"], [1, 2, 3], [0, 1, 1])], [sample(["a"], [1, 2, 4], [0, 1, 1])])
    assert (change.kinds, change.trained_more, change.trained_less) == (
        ("trained_more", "trained_less", "tokens"),
        1,
        1,
    )


def test_rewards_of_samples_and_turns() -> None:
    old = sample(["a"], [1], [1], None)
    assert only([old], [structs.replace(old, reward=0.0)]).kinds == ("reward",)
    turn = TurnSpan(start=0, end=1, turn=0, call_id="a")
    # That a stitcher knows turns is no change of rewards.
    assert changes_of([old], [structs.replace(old, turns=(turn,))]) == []
    assert only([old], [structs.replace(old, turns=(structs.replace(turn, reward=1.0),))]).kinds == ("turn_rewards",)


def test_totals_count_rollouts_without_samples_and_without_reward() -> None:
    totals = Totals()
    totals.add([sample(["a"], [1, 2], [1, 1])], 0.5)
    totals.add([], None)
    totals.add([], 1.0)
    assert (totals.rollouts, totals.samples, totals.trained_tokens, totals.rewarded) == (3, 1, 2, 2)
    assert totals.mean_reward() == 0.75
    assert trained_tokens(sample(["a"], [1, 2], [0, 1])) == 1
