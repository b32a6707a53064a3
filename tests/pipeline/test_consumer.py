from __future__ import annotations

import asyncio
from collections import Counter

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.consumer import Ack, ConsumerLoop, Dead, Handler, Nak, Outcome
from rollyard.pipeline.pull import Delivered
from rollyard.pipeline.streams import ConsumerSpec
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import DeadLetter

SPEC = ConsumerSpec(
    stream=subjects.STAGES,
    name="aggregate",
    filter_subject=subjects.stage_filter("aggregate", None),
    ack_wait_s=2.0,
)


def loop_for(bus: Bus, handler: Handler, **options: object) -> ConsumerLoop:
    settings: dict[str, object] = {"slots": 8, "heartbeat_s": 0.6, **options}
    return ConsumerLoop(bus, SPEC, handler, **settings)  # type: ignore[arg-type]


async def fill(bus: Bus, count: int) -> None:
    for number in range(count):
        await bus.publish("stage.aggregate.r", str(number).encode())


async def waiting(bus: Bus) -> int:
    return int((await bus.stream_info(subjects.STAGES))["state"]["messages"])


async def test_each_message_once_and_never_more_than_the_slots(bus: Bus) -> None:
    await fill(bus, 200)
    seen: Counter[int] = Counter()
    now, most = 0, 0
    stop = asyncio.Event()

    async def handler(message: Delivered) -> Outcome:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        seen[int(message.raw.data)] += 1
        if len(seen) == 200:
            stop.set()
        return Ack()

    await loop_for(bus, handler).run(stop)
    assert seen == Counter(range(200))
    assert most == 8
    assert await waiting(bus) == 0


async def test_work_longer_than_ack_wait_is_not_given_to_a_second_worker(bus: Bus) -> None:
    await fill(bus, 1)
    started: list[int] = []
    stop = asyncio.Event()

    async def handler(message: Delivered) -> Outcome:
        started.append(message.deliveries)
        await asyncio.sleep(SPEC.ack_wait_s * 2)
        stop.set()
        return Ack()

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(loop_for(bus, handler).run(stop))
    assert started == [1]


async def test_outcomes(bus: Bus) -> None:
    await fill(bus, 4)
    tries: Counter[int] = Counter()
    stop = asyncio.Event()

    async def handler(message: Delivered) -> Outcome:
        number = int(message.raw.data)
        tries[number] += 1
        if sum(tries.values()) == 7:
            stop.set()
        match number, tries[number]:
            case 0, 1:
                return Nak(0.05)
            case 1, 1:
                raise BusError("not now")
            case 2, 1:
                raise RuntimeError("a bug in the handler")
            case 3, _:
                return Dead("cannot be read")
        return Ack()

    await loop_for(bus, handler).run(stop)
    assert tries == {0: 2, 1: 2, 2: 2, 3: 1}
    assert await waiting(bus) == 0
    letters = [decode(m.data, DeadLetter) async for m in bus.read(subjects.DEAD, "dead.aggregate.r")]
    assert [(letter.reason, letter.body, letter.run) for letter in letters] == [("cannot be read", b"3", "r")]


async def test_stop_finishes_what_it_may_and_gives_back_the_rest(bus: Bus) -> None:
    await fill(bus, 30)
    stop = asyncio.Event()
    begun: list[int] = []

    async def slow(message: Delivered) -> Outcome:
        begun.append(message.seq)
        stop.set()
        await asyncio.sleep(3600)
        return Ack()

    await loop_for(bus, slow, drain_s=0.1).run(stop)
    assert await waiting(bus) == 30
    assert begun
    deliveries: list[int] = []

    seen: set[int] = set()
    stop_second = asyncio.Event()

    async def quick(message: Delivered) -> Outcome:
        seen.add(message.seq)
        deliveries.append(message.deliveries)
        if len(seen) == 30:
            stop_second.set()
        return Ack()

    await loop_for(bus, quick).run(stop_second)
    assert len(seen) == 30
    assert await waiting(bus) == 0
    # A polite stop is no failed try.
    assert set(deliveries) == {1}


async def test_a_deleted_consumer_is_made_again(bus: Bus) -> None:
    seen: set[bytes] = set()
    first, stop = asyncio.Event(), asyncio.Event()

    async def handler(message: Delivered) -> Outcome:
        seen.add(message.raw.data)
        first.set()
        if len(seen) == 2:
            stop.set()
        return Ack()

    async with asyncio.TaskGroup() as group:
        group.create_task(loop_for(bus, handler).run(stop))
        await bus.publish("stage.aggregate.r", b"before")
        await first.wait()
        await bus.api("CONSUMER.DELETE.STAGES.aggregate")
        await bus.publish("stage.aggregate.r", b"after")
    assert seen == {b"before", b"after"}
