"""The tree of ids against the plain lists that it stands for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.schemas.packed import TokenIds
from rollyard.stages.stitchers.graph import Node, TokenTree, common_bytes, fork, stretch

IDS = st.lists(st.integers(0, 2), max_size=8)
STEPS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), IDS), min_size=1, max_size=30)


def grown(steps: list[tuple[int, int, list[int]]]) -> list[tuple[list[int], Node]]:
    """Sequences, each going on from a place in an earlier one, with the node that stands for each."""
    tree = TokenTree()
    made: list[tuple[list[int], Node]] = [([], tree.root)]
    for which, where, ids in steps:
        before, node = made[which % len(made)]
        kept = where % (len(before) + 1)
        place = tree.at(node, kept)
        made.append((before[:kept] + ids, tree.insert(place, TokenIds.of(ids).data)))
    return made


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_a_node_stands_for_its_ids_whatever_came_after(steps: list[tuple[int, int, list[int]]]) -> None:
    for ids, node in grown(steps):
        assert TokenIds(node.ids()).tolist() == ids
        assert node.depth == len(ids)
        for start in range(len(ids) + 1):
            assert stretch(node, start, 3).tolist() == ids[start : start + 3]


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_equal_ids_are_one_node_and_what_is_shared_is_shared(steps: list[tuple[int, int, list[int]]]) -> None:
    made = grown(steps)
    for left_ids, left in made:
        for right_ids, right in made:
            shared = next(
                (at for at, (a, b) in enumerate(zip(left_ids, right_ids, strict=False)) if a != b),
                min(len(left_ids), len(right_ids)),
            )
            assert fork(left, right).depth == shared
            assert left.holds(right) == (left_ids[: len(right_ids)] == right_ids)
            assert (left is right) == (left_ids == right_ids)


@given(left=IDS, right=IDS, start=st.integers(0, 8))
def test_common_bytes_are_those_of_whole_ids(left: list[int], right: list[int], start: int) -> None:
    start = min(start, len(right))
    rest = right[start:]
    same = next((at for at, (a, b) in enumerate(zip(left, rest, strict=False)) if a != b), min(len(left), len(rest)))
    assert common_bytes(TokenIds.of(left).data, TokenIds.of(right).data, 4 * start) == 4 * same
