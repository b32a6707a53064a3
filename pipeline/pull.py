"""Pulling from a durable consumer: one open pull at a time, messages handed over as they come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas.errors import BusError

log = structlog.get_logger(__name__)

_SECOND_NS: Final = 1_000_000_000
ACK_TRIES: Final = 3


@dataclass(slots=True)
class Delivered:
    """A message of a work queue that this process holds. `deliveries` counts from 1."""

    bus: Bus
    raw: Stored
    deliveries: int
    reply: str

    @property
    def subject(self) -> str:
        """Where the message was published."""
        return self.raw.subject

    @property
    def seq(self) -> int:
        """Its sequence in the stream."""
        return self.raw.seq

    async def stored(self) -> Stored:
        """The message, its body fetched from the blob store when it was too large for the bus."""
        return await self.bus.resolve(self.raw)

    async def body(self) -> bytes:
        """The body of `stored`."""
        return (await self.stored()).data

    async def ack(self) -> None:
        """Acknowledge and wait until the server has taken it. A failure is harmless: the message comes again."""
        for _ in range(ACK_TRIES):
            try:
                await self.bus.request(self.reply, b"+ACK")
                return
            except BusError as error:
                log.debug("ack_failed", subject=self.subject, error=error.message)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give the message back, to be delivered again after `delay_s`."""
        body = b"-NAK"
        if delay_s > 0:
            body += b" " + msgspec.json.encode({"delay": int(delay_s * _SECOND_NS)})
        await self._tell(body)

    async def release(self) -> None:
        """Give the message back unworked: as a new one, so that a polite restart does not count as a failed try."""
        try:
            await self.bus.publish(self.subject, self.raw.data)
        except BusError as error:
            log.debug("not_released", subject=self.subject, error=error.message)
            await self.nak()
        else:
            await self.ack()

    async def progress(self) -> None:
        """Say that the work goes on; resets the server's ack_wait."""
        await self._tell(b"+WPI")

    async def terminate(self, reason: str) -> None:
        """Take the message out of the queue for good; the reason goes into the server's advisory."""
        await self._tell(b"+TERM " + " ".join(reason.split())[:200].encode())

    async def _tell(self, body: bytes) -> None:
        with suppress(nats.errors.Error, OSError):
            await self.bus.client.publish(self.reply, body)


def backoff_s(deliveries: int, *, first_s: float = 0.25, most_s: float = 20.0) -> float:
    """A delay before the next try: doubling, with jitter of a half either way."""
    delay: float = min(most_s, first_s * 2 ** min(deliveries, 20)) * random.uniform(0.5, 1.5)
    return delay


class ConsumerGone(BusError):
    """The consumer does not exist any more; make it again."""


class Pull:
    """Pulls for one consumer. `on_message` is called for each message, in the event loop, and must not block."""

    def __init__(self, bus: Bus, stream: str, consumer: str, on_message: Callable[[Delivered], None]) -> None:
        self._bus = bus
        self._stream = stream
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._on_message = on_message
        self._inbox = bus.client.new_inbox()
        self._number = 0
        self._left = 0
        self._done = asyncio.Event()
        self._gone: str | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Pull]:
        """Subscribe; on leaving, whatever still arrives is dropped and comes again after ack_wait."""
        subscription = await self._bus.client.subscribe(
            f"{self._inbox}.*", cb=self._deliver, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._bus.on_reconnect.add(self._done.set)
        try:
            yield self
        finally:
            self._bus.on_reconnect.discard(self._done.set)
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def pull(self, batch: int, *, expires_s: float = 2.0, no_wait: bool = False) -> None:
        """Ask for up to `batch` messages; returns when they came or the time is over.

        Raises ConsumerGone when the server does not know the consumer.
        """
        self._number += 1
        self._left = batch
        self._gone = None
        self._done.clear()
        body = (
            {"batch": batch, "no_wait": True} if no_wait else {"batch": batch, "expires": int(expires_s * _SECOND_NS)}
        )
        try:
            await self._bus.client.publish(self._next, msgspec.json.encode(body), f"{self._inbox}.{self._number}")
        except (nats.errors.Error, OSError) as error:
            raise BusError(f"cannot pull: {error!r}") from error
        with suppress(TimeoutError):
            async with asyncio.timeout(expires_s + 2.0):
                await self._done.wait()
        if self._gone is not None:
            raise ConsumerGone(f"{self._next}: {self._gone}")

    async def _deliver(self, message: Msg) -> None:
        headers = dict(message.headers or {})
        status = headers.get("Status")
        if status is not None:
            if message.subject == f"{self._inbox}.{self._number}":
                reason = headers.get("Description", "")
                if status == "503" or (status == "409" and "Deleted" in reason):
                    self._gone = reason or "no such consumer"
                self._done.set()
            return
        tokens = message.reply.split(".")
        self._left -= 1
        seq, time_ms = int(tokens[-4]), int(tokens[-2]) // 1_000_000
        raw = Stored(self._stream, message.subject, seq, time_ms, message.data, headers)
        self._on_message(Delivered(self._bus, raw, deliveries=int(tokens[-5]), reply=message.reply))
        if self._left <= 0:
            self._done.set()
