"""A session's calls as a forest: branches of ids, and what lies between them. Pure: no I/O, no clock, no arrival order.

A call extends the call whose prompt and sampled ids are exactly the start of its prompt ids; a branch is a walk from a
root to a leaf of that tree. Messages say which conversation a call goes on from, and so what a break in the ids means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rollyard.schemas.call import CallEvent
from rollyard.schemas.sample import DriftPoint, Link, LinkKind
from rollyard.stages.stitchers.breaks import break_of, point
from rollyard.stages.stitchers.graph import Turn, link_parents, read_turns
from rollyard.stages.stitchers.lenience import LAST_USER_EXTENDED, Matcher
from rollyard.stages.stitchers.lineage import Kin, Lineage
from rollyard.stages.stitchers.links import WORK, Starters, replaced

_ABOVE_ZERO: Final = 1e-3
"""What rounding may add to the logprob of a token that was certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """What became of a session's calls: `turns` in their order, the `kin` of each, and what lies between branches.

    `lenience` counts the calls that a rule matched.
    """

    turns: tuple[Turn, ...]
    kin: Mapping[str, Kin]
    links: tuple[Link, ...]
    drift: tuple[DriftPoint, ...]
    lenience: Mapping[str, int]

    @property
    def branches(self) -> tuple[tuple[str, ...], ...]:
        """The call ids of each walk, of calls whose ids can be trained and that the agent had."""
        return tuple(tuple(turn.call_id for turn in walk) for walk in walks(self.turns))

    @property
    def continues(self) -> dict[str, str]:
        """For a call the one whose conversation it goes on from, also where its ids do not."""
        return {call_id: kin.turn.call_id for call_id, kin in self.kin.items()}

    @property
    def excluded(self) -> dict[str, str]:
        """Why a call is in no branch: lost, error, aborted, superseded, untrainable, empty, bad_logprobs,
        nonfinite_logprobs, no_intent, broken or dead."""
        return {turn.call_id: turn.excluded for turn in self.turns if turn.excluded is not None}

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Calls with an intent and no end."""
        return tuple(turn.call_id for turn in self.turns if turn.end is None)


def grow(calls: Iterable[tuple[int, CallEvent]], off: Collection[str] = ()) -> Forest:
    """Arrange the calls of a session. `off` names rules of lenient matching that are switched off."""
    turns = read_turns(calls)
    exclude(turns)
    link_parents(turns)
    matcher = Matcher(off)
    lineage = Lineage(turns, matcher)
    dead, extended = replaced(turns, lineage.kin, matcher)
    if extended:
        lineage.lenience[LAST_USER_EXTENDED] += extended
    for each in dead.values():
        if each.excluded is None:
            each.excluded = "dead"
    between = _Between(turns, lineage, dead)
    return Forest(
        turns=tuple(turns),
        kin=lineage.kin,
        links=tuple(between.links),
        drift=tuple(between.drift),
        lenience=dict(lineage.lenience),
    )


# --- which calls count ---


def exclude(turns: Sequence[Turn]) -> None:
    """Say of each call that cannot be trained why."""
    for turn in turns:
        turn.excluded = _why_not(turn)
    packed = [turn.end.logprobs.data for turn in turns if turn.excluded is None and turn.end is not None]
    # One look at all of them: most sessions have no such number.
    if _fault_of(b"".join(packed)) is None:
        return
    for turn in turns:
        if turn.excluded is None and turn.end is not None:
            turn.excluded = _fault_of(turn.end.logprobs.data)


def _fault_of(logprobs: bytes) -> str | None:
    values = np.frombuffer(logprobs, "<f4")
    if not np.isfinite(values).all():
        return "nonfinite_logprobs"
    return "bad_logprobs" if (values > _ABOVE_ZERO).any() else None


def _why_not(turn: Turn) -> str | None:
    end = turn.end
    if turn.broken:
        return "broken" if turn.seq else "no_intent"
    if end is None:
        return "lost"
    if end.status != "ok":
        return end.status
    if end.untrainable:
        return "untrainable"
    if not end.completion_ids.data:
        return "empty"
    if end.logprobs.data and len(end.logprobs) != len(end.completion_ids):
        return "bad_logprobs"
    return None


# --- walks ---


def walks(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Every walk from a root to a leaf over calls that are not excluded, depth first, siblings in their order."""
    waiting = [turn for turn in turns if turn.excluded is None and turn.parent is None][::-1]
    while waiting:
        turn = waiting.pop()
        below = [child for child in turn.children or () if child.excluded is None]
        if below:
            waiting.extend(below[::-1])
        else:
            yield walk_to(turn)


def walk_to(turn: Turn) -> list[Turn]:
    """The calls from the root to this one."""
    walk = [turn]
    while (parent := walk[-1].parent) is not None:
        walk.append(parent)
    walk.reverse()
    return walk


# --- breaks and links ---

Thread = tuple[tuple[str, str, str], str]


class _Between:
    """Goes through the calls of a session in their order and says how each that begins a branch came to do so."""

    def __init__(self, turns: Sequence[Turn], lineage: Lineage, dead: Mapping[str, Turn]) -> None:
        self.drift: list[DriftPoint] = []
        self.links: list[Link] = []
        self._starters = Starters(turns)
        self._kin = lineage.kin
        self._matcher = lineage.matcher
        self._compacted: dict[Thread, Turn] = {}
        self._latest: dict[Thread, Turn] = {}
        for turn in turns:
            self._look(turn, dead.get(turn.call_id))

    def _look(self, turn: Turn, replaces: Turn | None) -> None:
        if replaces is not None:
            self._link("retry", turn, replaces)
        if turn.excluded is None:
            self._begins(turn, replaces)
        scenario = turn.intent.scenario
        if scenario == "compaction" and turn.end is not None and turn.end.status == "ok":
            origin = self._origin(turn)
            self._compacted[turn.thread, origin.intent.scenario] = origin
        elif scenario in WORK and turn.excluded is None:
            self._compacted.pop((turn.thread, scenario), None)
            self._latest[turn.thread, scenario] = turn

    def _begins(self, turn: Turn, replaces: Turn | None) -> None:
        kin = self._kin.get(turn.call_id)
        if kin is not None and kin.same and kin.turn is turn.parent and kin.turn.thread == turn.thread and not replaces:
            return  # most calls: they go on, and that is all
        if (condensed := self._condensed(turn, kin)) is not None:
            self.drift.append(point(turn, condensed, "compaction"))
            self._link("compaction", turn, condensed)
        elif is_sub_agent(turn) and (kin is None or kin.turn.thread != turn.thread):
            self._sub_agent(turn, kin)
        elif kin is not None and self._is_break(turn, kin):
            self.drift.append(break_of(turn, kin, self._matcher))
            self._link("resume", turn, kin.turn)
        elif replaces is not None:
            self.drift.append(point(turn, replaces, "retry"))

    def _sub_agent(self, turn: Turn, kin: Kin | None) -> None:
        """A sub-agent begins: with words of its own, or as a fork of the conversation that started it."""
        start = kin.turn if kin is not None else self._starters.find(turn)
        if kin is None or self._is_break(turn, kin):
            self.drift.append(point(turn, start, "sub_agent"))
        if start is not None:
            self._link("sub_agent", turn, start)

    def _is_break(self, turn: Turn, kin: Kin) -> bool:
        earlier = kin.turn
        if turn.parent is earlier or earlier.end is None:
            return False
        # Of a call without ids nobody can say whether they are continued.
        return earlier.end.status != "ok" or (earlier.tip.depth > 0 and not turn.prompt.holds(earlier.tip))

    def _origin(self, compaction: Turn) -> Turn:
        """The call whose conversation a compaction condenses."""
        kin = self._kin.get(compaction.call_id)
        return kin.turn if kin is not None else compaction

    def _condensed(self, turn: Turn, kin: Kin | None) -> Turn | None:
        """The call whose conversation was condensed before this one began anew, if it was.

        A call that goes on from messages that are all there was not. Some agents count their windows and let nobody see
        the compaction.
        """
        if turn.intent.scenario not in WORK or (kin is not None and kin.same):
            return None
        place = (turn.thread, turn.intent.scenario)
        latest = self._latest.get(place)
        if latest is not None and latest.intent.agent.window != turn.intent.agent.window:
            return self._compacted.get(place, latest)
        return self._compacted.get(place)

    def _link(self, kind: LinkKind, turn: Turn, to: Turn) -> None:
        self.links.append(Link(kind=kind, call_id=turn.call_id, to=to.call_id))


def is_sub_agent(turn: Turn) -> bool:
    """Whether a call is a sub-agent's, by its scenario or by what the agent says of itself."""
    agent = turn.intent.agent
    return turn.intent.scenario == "sub_agent" or bool(agent.sub_agent or agent.parent_thread)
