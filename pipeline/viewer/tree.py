"""The calls of a rollout's samples as a tree, drawn row by row: shared turns once, then forks, links and breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollyard.schemas.names import Scenario
from rollyard.schemas.sample import STRUCTURAL, DriftPoint, Link, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCall:
    """One call. Numbers are None where the samples hold no turns."""

    number: int
    """From 1, in the order of branches and turns."""
    call_id: str
    scenario: Scenario
    trained: bool = False
    new_tokens: int | None = None
    """Prompt tokens after those of the turn before."""
    sampled_tokens: int | None = None
    mean_logprob: float | None = None
    """Over its trained tokens."""
    reward: float | None = None
    links: tuple[Link, ...] = ()
    drift: tuple[DriftPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the drawing: what stands to the left, and what it shows; None: lines only."""

    graph: str
    shows: TreeCall | Link | DriftPoint | Sample | None = None


@dataclass(slots=True)
class _Node:
    call: TreeCall
    below: dict[str, _Node] = field(default_factory=dict)
    ends: list[Sample] = field(default_factory=list)
    weight: int = 1

    def side_and_trunk(self) -> tuple[list[_Node], _Node | None]:
        """What hangs below: the heaviest part goes straight on, so that no drawing is wide."""
        nodes = list(self.below.values())
        trunk = max(reversed(nodes), key=lambda node: node.weight, default=None)
        return [node for node in nodes if node is not trunk], trunk


class Tree:
    """The samples of one rollout, or some of them, as a forest of calls."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.calls: dict[str, TreeCall] = {}
        """By call id."""
        self._root = _Node(TreeCall(number=0, call_id="", scenario="main"))
        for sample in samples:
            self._add(sample)

    def _add(self, sample: Sample) -> None:
        node = self._root
        path, added = [], 0
        for call in calls_of(sample):
            path.append(node)
            known = node.below.get(call.call_id)
            if known is None:
                known = node.below[call.call_id] = _Node(replace(call, number=len(self.calls) + 1))
                added += 1
            elif call.trained:
                # A branch that holds it as context may have come first.
                known.call = replace(call, number=known.call.number)
            self.calls[call.call_id] = known.call
            node = known
        node.ends.append(sample)
        for depth, above in enumerate(path):
            above.weight += min(added, len(path) - depth)

    def name(self, call_id: str) -> str:
        """How a call is called beside the drawing."""
        call = self.calls.get(call_id)
        return f"call {call.number}" if call else f"call {call_id}, which is in no sample"

    def rows(self) -> Iterator[Row]:
        """The drawing from top to bottom."""
        for sample in self._root.ends:
            yield Row("■", sample)
        for index, node in enumerate(self._root.below.values()):
            if index or self._root.ends:
                yield Row("")
            yield from _trunk(node, "")


def _trunk(node: _Node | None, lead: str) -> Iterator[Row]:
    while node is not None:
        call = node.call
        for link in call.links:
            # A break that says the same says it better.
            if not any(point.reason == link.kind and point.continues == link.to for point in call.drift):
                yield Row(lead + "↳", link)
        for point in call.drift:
            yield Row(lead + ("↳" if point.reason in STRUCTURAL else "✗"), point)
        yield Row(lead + ("●" if call.trained else "○"), call)
        for sample in node.ends:
            yield Row(lead + ("├■" if node.below else "■"), sample)
        side, trunk = node.side_and_trunk()
        for below in side:
            yield Row(lead + "├─╮")
            yield from _trunk(below, lead + "│ ")
        node = trunk


def calls_of(sample: Sample) -> list[TreeCall]:
    """The calls of one sample, numbered from 1."""
    turns = {turn.call_id: turn for turn in sample.turns}
    mask = np.asarray(sample.loss_mask).astype(bool)
    known = mask & ~np.isnan(sample.logprobs)
    # Sums up to each token, so that a turn costs two look-ups.
    counts = np.concatenate(([0], np.cumsum(known)))
    sums = np.concatenate(([0.0], np.cumsum(np.where(known, sample.logprobs, 0.0), dtype=np.float64)))
    trained = np.concatenate(([0], np.cumsum(mask)))
    calls = []
    end = 0
    for number, call_id in enumerate(sample.calls, 1):
        call = TreeCall(
            number=number,
            call_id=call_id,
            scenario=sample.scenario,
            links=tuple(link for link in sample.links if link.call_id == call_id),
            drift=tuple(point for point in sample.drift if point.call_id == call_id),
        )
        turn = turns.get(call_id)
        if turn is not None:
            count = counts[turn.end] - counts[turn.start]
            call = replace(
                call,
                scenario=turn.scenario,
                trained=bool(trained[turn.end] > trained[turn.start]),
                new_tokens=turn.start - end,
                sampled_tokens=turn.end - turn.start,
                mean_logprob=float(sums[turn.end] - sums[turn.start]) / int(count) if count else None,
                reward=turn.reward,
            )
            end = turn.end
        calls.append(call)
    return calls
