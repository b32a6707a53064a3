"""Reading a stream in order, and going on as it grows: an ordered consumer that survives reconnects and gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas.errors import BusError

HEARTBEAT_S: Final = 5.0
RETRY_S: Final = 0.2
_SECOND_NS: Final = 1_000_000_000


class CaughtUp:
    """Stands in the flow where everything that was stored at the start has been handed out."""


async def follow(
    bus: Bus,
    stream: str,
    subject_filter: str,
    *,
    start_seq: int = 1,
    newest_of_each: bool = False,
    headers_only: bool = False,
) -> AsyncIterator[Stored | CaughtUp]:
    """Messages under a filter in stream order, without end; one CaughtUp when the stored ones are through.

    `newest_of_each` begins with the newest message of each subject; `headers_only` leaves out the bodies. A lost
    connection, a server restart or a gap makes a new consumer after the last message that was handed out; nothing is
    skipped or repeated.
    """
    seq = start_seq
    told = False
    while True:
        policy: dict[str, Any] = {"deliver_policy": "by_start_sequence", "opt_start_seq": max(seq, 1)}
        if newest_of_each and seq == start_seq:
            policy = {"deliver_policy": "last_per_subject"}
        if headers_only:
            policy["headers_only"] = True
        try:
            async for item in _attempt(bus, stream, subject_filter, policy):
                if isinstance(item, CaughtUp):
                    if not told:
                        told = True
                        yield item
                    continue
                yield item
                seq = item.seq + 1
        except BusError:
            if bus.closed.is_set():
                raise
            await asyncio.sleep(RETRY_S)


async def _attempt(
    bus: Bus, stream: str, subject_filter: str, policy: dict[str, Any]
) -> AsyncIterator[Stored | CaughtUp]:
    inbox = bus.client.new_inbox()
    arrived: asyncio.Queue[Msg | None] = asyncio.Queue()

    def reconnected() -> None:
        arrived.put_nowait(None)

    # Not next_msg(): under Python 3.11 it can swallow a cancellation.
    subscription = await bus.client.subscribe(inbox, cb=arrived.put, pending_msgs_limit=0, pending_bytes_limit=0)
    bus.on_reconnect.add(reconnected)
    try:
        config = {
            "filter_subject": subject_filter,
            "deliver_subject": inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "idle_heartbeat": int(HEARTBEAT_S * _SECOND_NS),
            "flow_control": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 60 * _SECOND_NS,
            **policy,
        }
        made = await bus.api(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
        if made["num_pending"] == 0:
            yield CaughtUp()
        expected = 1
        while True:
            message = await _next(arrived)
            if message.headers and message.headers.get("Status") == "100":
                await _answer_flow_control(bus, message)
                continue
            tokens = message.reply.split(".")
            seq, position, pending = int(tokens[-4]), int(tokens[-3]), int(tokens[-1])
            if position != expected:
                raise BusError(f"a gap in the flow of {stream} before {seq}")
            expected += 1
            time_ms = int(tokens[-2]) // 1_000_000
            headers = dict(message.headers or {})
            stored = Stored(stream, message.subject, seq, time_ms, message.data, headers)
            yield stored if "headers_only" in policy else await bus.resolve(stored)
            if pending == 0:
                yield CaughtUp()
    finally:
        bus.on_reconnect.discard(reconnected)
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()


async def _next(arrived: asyncio.Queue[Msg | None]) -> Msg:
    try:
        async with asyncio.timeout(HEARTBEAT_S * 2.5):
            message = await arrived.get()
    except TimeoutError as error:
        raise BusError("the flow fell silent") from error
    if message is None:
        # The consumer lives in the memory of the server, which may be another one now.
        raise BusError("the connection was made anew")
    return message


async def _answer_flow_control(bus: Bus, message: Msg) -> None:
    stalled = (message.headers or {}).get("Nats-Consumer-Stalled")
    reply = message.reply or stalled
    if reply:
        await bus.client.publish(reply)
