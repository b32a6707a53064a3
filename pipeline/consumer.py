"""The one consumer loop that every stage uses.

It fetches only for free slots, tells the server that held messages are being worked on, and turns the handler's
explicit outcome into ack, delayed nak or dead letter. On stop it goes the way that loses nothing: no new pull, the
open one runs out, held messages are finished or given back, then the connection may close.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.dead import bury
from rollyard.pipeline.pull import ConsumerGone, Delivered, Pull, backoff_s
from rollyard.pipeline.streams import ConsumerSpec, ensure_consumer
from rollyard.schemas.errors import BlobRefused, BusAway, BusError, BusFull, Conflict, RollyardError, TooLarge

log = structlog.get_logger(__name__)

PULL_S: Final = 2.0
MOST_WAIT_S: Final = 5.0
LINGER_S: Final = 0.01
LINGER_SHARE: Final = 4
HELD_TRIES: Final = 30


@dataclass(frozen=True, slots=True)
class Ack:
    """The message is dealt with."""


@dataclass(frozen=True, slots=True)
class Nak:
    """Deliver it again, after `delay_s` seconds."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Dead:
    """It can never be worked on: keep it in DEAD with the reason."""

    reason: str


Outcome = Ack | Nak | Dead
Handler = Callable[[Delivered], Awaitable[Outcome]]


class ConsumerLoop:
    """Runs `handler` for the messages of one consumer, at most `slots` at a time.

    `room` may hold pulls back: it returns how many more messages are wanted now. `drain_s` is how long held messages
    may go on after a stop before they are given back.
    """

    def __init__(
        self,
        bus: Bus,
        spec: ConsumerSpec,
        handler: Handler,
        *,
        slots: int,
        heartbeat_s: float = 6.0,
        drain_s: float = 20.0,
        room: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._handler = handler
        self._slots = slots
        self._heartbeat_s = heartbeat_s
        self._drain_s = drain_s
        self._room = room
        self._held: dict[int, Delivered] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._stopping = False

    @property
    def held(self) -> int:
        """Messages that are being worked on."""
        return len(self._held)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then drain."""
        await self._ensure(stop)
        pull = Pull(self._bus, self._spec.stream, self._spec.name, self._take)
        async with pull.open(), asyncio.TaskGroup() as group:
            heartbeat = group.create_task(self._heartbeat())
            try:
                await self._fetch(pull, stop)
                self._stopping = True
                await self._drain()
            finally:
                heartbeat.cancel()
                for task in self._tasks:
                    task.cancel()

    async def _ensure(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await ensure_consumer(self._bus, self._spec)
                return
            except BusError as error:
                if self._bus.closed.is_set():
                    raise
                log.warning("consumer_not_made", consumer=self._spec.name, error=str(error))
                await asyncio.sleep(1.0)

    async def _fetch(self, pull: Pull, stop: asyncio.Event) -> None:
        while not stop.is_set():
            free = self._slots - len(self._held)
            if 0 < free < self._slots // LINGER_SHARE:
                # Slots that are freed one by one would cost one pull each.
                await _wait_any(stop, timeout_s=LINGER_S)
                free = self._slots - len(self._held)
            if free <= 0:
                self._freed.clear()
                await _wait_any(stop, self._freed, timeout_s=1.0)
                continue
            try:
                if self._room is not None:
                    free = min(free, await self._room())
                if free <= 0:
                    await _wait_any(stop, timeout_s=0.1)
                    continue
                await pull.pull(free, expires_s=PULL_S)
            except ConsumerGone as error:
                log.info("consumer_gone", consumer=self._spec.name, reason=error.message)
                await asyncio.sleep(1.0)
                await self._ensure(stop)
            except BusError as error:
                if self._bus.closed.is_set():
                    raise
                log.warning("pull_failed", consumer=self._spec.name, error=error.message)
                await asyncio.sleep(1.0)

    def _take(self, message: Delivered) -> None:
        if message.seq in self._held:
            # This process stood still for longer than ack_wait. The work goes on; an older reply subject is as good.
            return
        if self._stopping or len(self._held) >= self._slots:
            task = asyncio.create_task(message.release())
        else:
            self._held[message.seq] = message
            task = asyncio.create_task(self._work(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, message: Delivered) -> None:
        try:
            outcome = await self._outcome(message)
            match outcome:
                case Ack():
                    await message.ack()
                case Nak(delay_s):
                    await message.nak(delay_s)
                case Dead(reason):
                    await bury(self._bus, self._spec.name, message, reason)
        except asyncio.CancelledError:
            await message.release()
            raise
        except RollyardError as error:
            log.warning("outcome_failed", subject=message.subject, error=error.message)
            await message.nak(backoff_s(message.deliveries))
        finally:
            self._held.pop(message.seq, None)
            self._freed.set()

    async def _outcome(self, message: Delivered) -> Outcome:
        try:
            return await self._when_the_bus_can(message)
        except RollyardError as error:
            log.warning("handler_failed", subject=message.subject, deliveries=message.deliveries, error=str(error))
        except Exception:
            # The boundary: a bug in one handler must not stop the loop.
            log.exception("handler_crashed", subject=message.subject, deliveries=message.deliveries)
        return Nak(backoff_s(message.deliveries))

    async def _when_the_bus_can(self, message: Delivered) -> Outcome:
        """Hold the message while the bus is away, full or behind: a redelivery would count against it."""
        for tries in itertools.count(1):
            try:
                return await self._handler(message)
            except (BusError, BlobRefused) as error:
                if not _passes_by_itself(error, tries):
                    raise
                log.warning("waits_for_the_bus", subject=message.subject, error=str(error))
            # The state that the message carries may be old by now: see Handover.read.
            message.deliveries = max(message.deliveries, 2)
            await asyncio.sleep(backoff_s(tries, most_s=MOST_WAIT_S))
        raise AssertionError("unreachable")

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for message in list(self._held.values()):
                await message.progress()

    async def _drain(self) -> None:
        tasks = list(self._tasks)
        if tasks and self._drain_s > 0:
            await asyncio.wait(tasks, timeout=self._drain_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=10.0)


def _passes_by_itself(error: BusError | BlobRefused, tries: int) -> bool:
    """Whether a message waits out an error of the bus: one that is away or full for ever, another one for a while."""
    if isinstance(error, BusAway | BusFull | BlobRefused):
        return True
    return not isinstance(error, Conflict | TooLarge) and tries < HELD_TRIES


async def _wait_any(*events: asyncio.Event, timeout_s: float) -> None:
    """Return when one of the events is set, or after `timeout_s`."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
