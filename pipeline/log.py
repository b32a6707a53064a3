"""Reading the log: the events of one rollout, and the rollouts of a whole run in one pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.single_error import single_error
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEvent, CallIntent
from rollyard.schemas.errors import BusError, DecodeError
from rollyard.schemas.rollout import RolloutEvent
from rollyard.schemas.sample import Commit

LogEvent = CallEvent | RolloutEvent | Commit
Events = list[tuple[int, LogEvent]]

_KINDS: Final[dict[str, Any]] = {"call": CallEvent, "life": RolloutEvent, "commit": Commit}


def decode_event(stored: Stored, contents: Contents) -> LogEvent:
    """The event in a message of the LOG, whole. Raises DecodeError, which names subject and sequence, or BlobError."""
    kind = _KINDS.get(stored.subject.rpartition(".")[2])
    if kind is None:
        raise DecodeError(f"{stored.subject} at {stored.seq} of LOG is of no kind that this release knows")
    try:
        event: LogEvent = decode(stored.data, kind)
    except DecodeError as error:
        raise DecodeError(f"{stored.subject} at {stored.seq} of LOG: {error.message}", hint=error.hint) from error
    return contents.put_back(event) if isinstance(event, CallIntent) else event


async def read_rollout(
    bus: Bus, run: str, rollout_id: str, *, at_least: int = 0, kinds: Iterable[str] = tuple(_KINDS)
) -> Events:
    """The events of a rollout in log order, all attempts, the commit included, or only those of some kinds.

    `at_least` is the LOG sequence of an event of this rollout that must be among them: raises BusError when the server
    that answers has not got it yet. Raises DecodeError.
    """

    # One read a kind: under a wildcard the server walks the log, by the whole subject it looks it up (measured: 16x).
    async def read(kind: str) -> Events:
        subject = subjects.log_subject(run, rollout_id, kind)
        return [(stored.seq, decode_event(stored, bus.contents)) async for stored in bus.read(subjects.LOG, subject)]

    with single_error():
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(read(kind)) for kind in kinds]
    events = sorted((event for done in reads for event in done.result()), key=lambda event: event[0])
    newest = events[-1][0] if events else 0
    if newest < at_least:
        raise BusError(f"the log of rollout {rollout_id} shows {newest}, not yet {at_least}", hint="try again")
    return events


@dataclass(slots=True)
class RolloutLog:
    """The events of one rollout as they are stored, up to its commit; decoded when asked for."""

    rollout_id: str
    contents: Contents
    stored: list[Stored] = field(default_factory=list)
    committed: bool = False

    def events(self) -> Events:
        """The events in log order, the commit included. Raises DecodeError."""
        return [(stored.seq, decode_event(stored, self.contents)) for stored in self.stored]


def rollouts_of(bus: Bus, run: str, *, until_seq: int | None = None) -> AsyncIterator[RolloutLog]:
    """Each rollout of a run in the LOG: see `by_rollout`."""
    events = bus.read(subjects.LOG, subjects.log_subject(run, "*", "*"), until_seq=until_seq)
    return by_rollout(events, bus.contents)


async def by_rollout(events: AsyncIterator[Stored], contents: Contents) -> AsyncIterator[RolloutLog]:
    """The rollouts that the events of a run, in log order, make: in the order of their commits; then those without one.

    One pass. What it holds at a time is the rollouts that were in flight together: a commit ends a rollout, and what is
    logged after it is passed over, since nothing after the cut counts.
    """
    in_flight: dict[str, RolloutLog] = {}
    committed: set[str] = set()
    async for stored in events:
        _, _, rollout_id, kind = stored.subject.split(".")
        if rollout_id in committed:
            continue
        rollout = in_flight.setdefault(rollout_id, RolloutLog(rollout_id, contents))
        rollout.stored.append(stored)
        if kind == "commit":
            rollout.committed = True
            committed.add(rollout_id)
            yield in_flight.pop(rollout_id)
    for rollout in in_flight.values():
        yield rollout


class LogSource(Protocol):
    """Where replay reads a run's events: the log itself, or an archive of it."""

    def rollouts(self, run: str) -> AsyncIterator[RolloutLog]:
        """Each rollout of a run, in the order of their commits; at the end those without a commit.

        Raises BusError for the log, ArchiveError for an archive.
        """
        ...


class BusLog:
    """The LOG of a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def rollouts(self, run: str) -> AsyncIterator[RolloutLog]:
        """See `LogSource`."""
        return rollouts_of(self._bus, run)
