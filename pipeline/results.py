"""What a trainer reads: deliveries, samples and complete groups of a run, each under a durable name."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.pull import Delivered
from rollyard.pipeline.reader import MAX_HELD, AckMode, Reader
from rollyard.pipeline.streams import ConsumerSpec
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, ConfigError, DecodeError
from rollyard.schemas.sample import Delivery, Group, Sample

_READ_TRIES: Final = 8
_READ_PAUSE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """A complete group: one delivery for each of its rollouts, ordered by index."""

    group: Group
    deliveries: tuple[Delivery, ...]


def delivery_reader(bus: Bus, run: str, name: str, ack: AckMode, ack_wait_s: float) -> Reader[Delivery]:
    """Deliveries of a run, one for each finished rollout, in the order in which they were made."""

    async def unpack(message: Delivered) -> list[Delivery]:
        return [await _delivery(message)]

    return Reader(bus, _spec(run, name, f"sample.{_token(run)}.>", ack_wait_s), unpack, ack)


def sample_reader(bus: Bus, run: str, name: str, ack: AckMode, ack_wait_s: float) -> Reader[Sample]:
    """The samples of those deliveries; a delivery without samples is passed over."""

    async def unpack(message: Delivered) -> list[Sample]:
        return list((await _delivery(message)).samples)

    return Reader(bus, _spec(run, name, f"sample.{_token(run)}.>", ack_wait_s), unpack, ack)


def group_reader(bus: Bus, run: str, name: str, ack: AckMode, ack_wait_s: float) -> Reader[GroupBatch]:
    """Complete groups of a run, in the order in which they were completed."""

    async def unpack(message: Delivered) -> list[GroupBatch]:
        return [await _group(bus, message)]

    # A name may read deliveries and groups side by side: they are two consumers.
    return Reader(bus, _spec(run, f"{name}-groups", f"group.{_token(run)}.>", ack_wait_s), unpack, ack)


def _spec(run: str, name: str, subject_filter: str, ack_wait_s: float) -> ConsumerSpec:
    return ConsumerSpec(
        stream=subjects.SAMPLES,
        name=f"trainer-{_token(run)}-{_token(name)}",
        filter_subject=subject_filter,
        ack_wait_s=ack_wait_s,
        max_ack_pending=MAX_HELD,
    )


def _token(text: str) -> str:
    try:
        return subjects.token(text)
    except ValueError as error:
        raise ConfigError(f"{text[:60]!r} cannot name a run or a reader: {error}", hint="choose another name") from None


async def _delivery(message: Delivered) -> Delivery:
    try:
        return decode(await message.body(), Delivery)
    except DecodeError as error:
        raise DecodeError(f"{message.subject}, sequence {message.seq}: {error.message}", hint=error.hint) from None


async def _group(bus: Bus, message: Delivered) -> GroupBatch:
    group: Group = decode(await message.body(), Group)
    members = message.subject.replace("group.", "sample.", 1) + ".*"
    deliveries: list[Delivery] = []
    for _ in range(_READ_TRIES):
        stored = bus.read(subjects.SAMPLES, members, start_seq=max(1, group.first_seq), until_seq=message.seq)
        deliveries = [decode(item.data, Delivery) async for item in stored]
        if len(deliveries) >= group.size:
            return GroupBatch(group, tuple(sorted(deliveries, key=lambda delivery: delivery.index)))
        # The server that answered may be a replica that has not caught up.
        await asyncio.sleep(_READ_PAUSE_S)
    raise BusError(
        f"group {group.group_id!r} has {len(deliveries)} of its {group.size} deliveries left in SAMPLES",
        hint="they were trimmed; `rollyard replay` makes them again from the log",
    )
