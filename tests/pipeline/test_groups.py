"""A group closes once, when its last delivery is there, whoever sees it."""

from __future__ import annotations

import asyncio

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.groups import GroupCloser, close_if_complete
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.sample import Group
from rollyard.schemas.task import TaskProgress

RUN, TASK, SIZE = "a run", "a task", 5


async def deliver(bus: Bus, index: int, task: str = TASK) -> None:
    await bus.create(subjects.sample_subject(RUN, task, index), b"a delivery")


async def groups(bus: Bus) -> list[Group]:
    return [decode(stored.data, Group) async for stored in bus.read(subjects.SAMPLES, "group.*.*")]


async def accept(bus: Bus) -> Bucket[TaskProgress]:
    bucket: Bucket[TaskProgress] = Bucket(bus, subjects.TASK_BUCKET, TaskProgress)
    progress = TaskProgress(content_hash="x", group_size=SIZE, progress="fanned_out", task_id=TASK, run=RUN)
    await bucket.create(subjects.task_key(RUN, TASK), progress)
    return bucket


async def test_it_closes_with_its_last_delivery_and_not_before(bus: Bus) -> None:
    tasks = await accept(bus)
    for index in range(SIZE):
        assert not await close_if_complete(bus, RUN, TASK, SIZE)
        await deliver(bus, index)
        await deliver(bus, index, "another task")
    assert await groups(bus) == []
    assert await close_if_complete(bus, RUN, TASK, SIZE)
    assert await close_if_complete(bus, RUN, TASK, SIZE)
    assert await groups(bus) == [Group(run=RUN, task_id=TASK, group_id=TASK, size=SIZE)]
    found = await tasks.get(subjects.task_key(RUN, TASK))
    assert found is not None
    assert (found[0].progress, found[0].content_hash) == ("closed", "x")


async def test_many_that_see_it_at_once_close_it_once(bus: Bus) -> None:
    tasks = await accept(bus)
    closers = [GroupCloser(bus) for _ in range(3)]

    async def last(number: int) -> None:
        await deliver(bus, number % SIZE)
        await closers[number % 3].close_if_complete(RUN, TASK, SIZE)

    async with asyncio.TaskGroup() as group:
        for number in range(SIZE * 4):
            group.create_task(last(number))
    assert len(await groups(bus)) == 1
    assert (await bus.subjects(subjects.SAMPLES, "group.*.*")) == {subjects.group_subject(RUN, TASK): 1}
    found = await tasks.get(subjects.task_key(RUN, TASK))
    assert found is not None
    assert found[0].progress == "closed"


async def test_a_task_that_is_still_being_admitted_or_is_unknown_does_not_hinder(bus: Bus) -> None:
    for index in range(SIZE):
        await deliver(bus, index)
    assert await close_if_complete(bus, RUN, TASK, SIZE)
    assert len(await groups(bus)) == 1
