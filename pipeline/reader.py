"""Reading a run's results under a durable name: nothing is skipped, and what was not acknowledged comes again.

A message is held, with heartbeats, from its arrival until it is acknowledged. Until then a crash, a `break` or a lost
connection brings it back, to this reader or to another one under the same name. Delivery is therefore at least once;
`rollout_id` and `sample_id` tell repetitions. One reader never hands out a message twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, Literal, Self, TypeVar

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.pull import ConsumerGone, Delivered, Pull
from rollyard.pipeline.streams import ConsumerSpec, ensure_consumer
from rollyard.schemas.errors import BusError, ConfigError, RollyardError

log = structlog.get_logger(__name__)

T = TypeVar("T")
AckMode = Literal["next", "manual"]
Unpack = Callable[[Delivered], Awaitable[list[T]]]

PREFETCH: Final = 16
MAX_HELD: Final = 10_000
_REMEMBERED_ACKS: Final = 4096
_ACKS_AT_ONCE: Final = 64
_NO_CONSUMER: Final = "(10014)"


class Reader(Generic[T]):
    """An endless async iterator over the items of a durable consumer's messages.

    ack="next": a message is acknowledged when its last item has been handed out and the next item is asked for.
    ack="manual": only `ack()` acknowledges, everything that was handed out in full since the last call.
    A message that holds no item counts as handed out. One task at a time may ask for the next item.
    """

    def __init__(self, bus: Bus, spec: ConsumerSpec, unpack: Unpack[T], ack: AckMode = "next") -> None:
        if ack not in ("next", "manual"):
            raise ConfigError(f"ack={ack!r} is not known", hint="choose 'next' or 'manual'")
        self._bus = bus
        self._spec = spec
        self._unpack = unpack
        self._ack_on_next = ack == "next"
        self._held: dict[int, Delivered] = {}
        self._waiting: deque[int] = deque()
        self._items: deque[T] = deque()
        self._finished: list[int] = []
        self._acked: deque[int] = deque(maxlen=_REMEMBERED_ACKS)
        self._count = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._closed = False
        self._failure: Exception | None = None
        self._last: T | None = None

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __anext__(self) -> T:
        return await self.item(self._count + 1)

    async def item(self, number: int) -> T:
        """The item `number`, from 1: the next one, or once more the last one, for a caller who missed the answer.

        Raises BusError, DecodeError or BlobError; a message that cannot be read stays the next one.
        """
        if number == self._count and self._last is not None:
            return self._last
        if self._ack_on_next:
            await self.ack()
        await self._start()
        while not self._items:
            await self._next_message()
        # No await from here on: a cancelled caller must not lose an item.
        item = self._items.popleft()
        if not self._items:
            self._finished.append(self._waiting.popleft())
        self._count += 1
        self._last = item
        self._changed.set()
        return item

    async def ack(self) -> int:
        """Acknowledge every message that was handed out in full; returns how many. They do not come again."""
        count = 0
        while self._finished:
            seqs = self._finished[:_ACKS_AT_ONCE]
            async with asyncio.TaskGroup() as group:
                for seq in seqs:
                    group.create_task(self._held[seq].ack())
            del self._finished[: len(seqs)]
            for seq in seqs:
                self._acked.append(seq)
                del self._held[seq]
            count += len(seqs)
            self._changed.set()
        return count

    async def close(self) -> None:
        """Stop, and give back what was not acknowledged, at once. The place of the durable name stays."""
        self._closed = True
        self._changed.set()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for message in self._held.values():
            await message.nak()
        for kept in (self._held, self._waiting, self._items, self._finished):
            kept.clear()

    async def _next_message(self) -> None:
        """Unpack the oldest waiting message; wait for one if there is none."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise BusError(f"the reader {self._spec.name} is closed", hint="open a new one with the same name")
            if len(self._finished) >= MAX_HELD:
                raise RollyardError(
                    f"{MAX_HELD} messages of {self._spec.name} are held and not acknowledged",
                    hint="call ack() after each training step",
                )
            self._changed.clear()
            await self._changed.wait()
        self._items.extend(await self._unpack(self._held[self._waiting[0]]))
        if not self._items:
            self._finished.append(self._waiting.popleft())
            self._changed.set()
            if self._ack_on_next:
                await self.ack()

    async def _start(self) -> None:
        if self._started or self._closed:
            return
        await self._open_consumer()
        self._started = True
        for work in (self._fetch, self._heartbeat):
            task = asyncio.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open_consumer(self) -> None:
        name, wanted = self._spec.name, self._spec.filter_subject
        standing = await self._standing_filter()
        if standing not in (None, wanted):
            raise ConfigError(
                f"the durable name {name} is used for {standing} and cannot be used for {wanted}",
                hint="choose another name: durable='...'",
            )
        await ensure_consumer(self._bus, self._spec)

    async def _standing_filter(self) -> str | None:
        try:
            info = await self._bus.api(f"CONSUMER.INFO.{self._spec.stream}.{self._spec.name}")
        except BusError as error:
            if _NO_CONSUMER in error.message:
                return None
            raise
        return str(info["config"].get("filter_subject", ""))

    async def _fetch(self) -> None:
        pull = Pull(self._bus, self._spec.stream, self._spec.name, self._take)
        try:
            async with pull.open():
                while True:
                    room = min(PREFETCH - len(self._waiting), MAX_HELD - len(self._held))
                    if room > 0:
                        await self._pull(pull, room)
                    else:
                        self._changed.clear()
                        await self._changed.wait()
        except Exception as error:  # noqa: BLE001 - the boundary: whoever waits for an item must hear of it
            self._failure = error
            self._changed.set()

    async def _pull(self, pull: Pull, batch: int) -> None:
        try:
            await pull.pull(batch)
        except BusError as error:
            if self._bus.closed.is_set():
                raise
            log.info("pull_failed", consumer=self._spec.name, error=error.message)
            await asyncio.sleep(1.0)
            if isinstance(error, ConsumerGone):
                await self._check_consumer()

    async def _check_consumer(self) -> None:
        """A server that is starting says the same as one without the consumer; the question tells them apart."""
        with suppress(BusError):
            if await self._standing_filter() is not None:
                return
            raise RollyardError(
                f"the durable name {self._spec.name} was deleted while it was read, and its place is lost",
                hint="open it again; it then begins at the first result of the run",
            )

    def _take(self, message: Delivered) -> None:
        if self._closed:
            return
        if message.seq in self._acked:
            self._spawn(message.ack())
        elif message.seq in self._held:
            # It came again since heartbeats were late; the newer reply subject is the one that counts.
            self._held[message.seq] = message
        else:
            self._held[message.seq] = message
            self._waiting.append(message.seq)
            self._changed.set()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._spec.ack_wait_s / 3)
            for message in list(self._held.values()):
                await message.progress()
