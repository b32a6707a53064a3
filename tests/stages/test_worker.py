"""A worker: any stages in one process, and a stop that leaves every message where the next one finds it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.config import WorkerStage
from rollyard.pipeline.consumer import Ack, ConsumerLoop, Outcome
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pull import Delivered
from rollyard.pipeline.streams import ConsumerSpec
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, ConfigError
from rollyard.schemas.fleet import Lease
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task
from rollyard.stages.worker import run_worker

STAGES: tuple[WorkerStage, ...] = ("admit", "init", "run", "eval", "aggregate")


def noop(number: int, group_size: int = 4, **args: Any) -> Task:
    return Task(
        prompt="p",
        id=f"t{number}",
        group_size=group_size,
        agent=AgentSpec(harness="noop", args={"answer": "yes", **args}),
        sandbox=SandboxSpec(backend="none"),
        evaluation=EvaluationSpec(rule="exact", args={"answer": "yes"}),
    )


async def delivered(crew: Any, count: int) -> None:
    async def all_there() -> bool:
        return len(await crew.bus.subjects(subjects.SAMPLES, "sample.r.*.*")) == count

    await crew.until(all_there)


@pytest.mark.parametrize(
    "processes",
    [[STAGES], [("admit", "aggregate"), ("init", "run"), ("run", "eval")], [*((stage,) for stage in STAGES)]],
    ids=["all in one", "some together", "one each"],
)
async def test_any_subset_of_the_stages_makes_a_process(crew: Any, processes: list[tuple[WorkerStage, ...]]) -> None:
    await crew.submit(*(noop(number) for number in range(5)))
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for stages in processes:
            group.create_task(run_worker(crew.config, stages, 8, stop))
        await delivered(crew, 20)
        stop.set()
    deliveries = await crew.deliveries()
    assert {(one.task_id, one.index) for one in deliveries} == {(f"t{n}", i) for n in range(5) for i in range(4)}
    assert {(one.status, one.reward, len(one.samples)) for one in deliveries} == {("completed", 1.0, 1)}
    assert len(await crew.bus.subjects(subjects.SAMPLES, "group.r.*")) == 5
    assert await crew.due() == []


async def test_a_stop_gives_everything_back_and_the_next_worker_finds_it_at_once(crew: Any) -> None:
    await crew.submit(*(noop(number, sleep_s=3600) for number in range(3)))
    async with crew.at_work(*STAGES):

        async def all_in_run() -> bool:
            return await crew.due() == ["stage.run.any.r"] * 12

        await crew.until(all_in_run)
    assert await crew.due() == ["stage.run.any.r"] * 12
    held = await crew.take("run", "any", 12)
    # A polite stop is no failed try.
    assert {message.deliveries for message in held} == {1}


async def test_a_worker_shows_that_its_places_live_and_leaves_the_lease_to_others(crew: Any) -> None:
    nodes: Bucket[Lease] = Bucket(crew.bus, subjects.NODES, Lease)
    place = crew.context.backends["local"].place

    async def renewed() -> bool:
        found = await nodes.get(place)
        return found is not None and found[0].renewal >= 1

    async with crew.at_work("run"):
        await crew.until(renewed)
        assert [key async for key, _, _ in nodes.items()] == [place]  # `none` is everywhere
    assert await nodes.get(place) is not None


async def test_a_worker_without_a_secret_says_how_to_make_one(crew: Any) -> None:
    Path(crew.config.data_dir(), "secret").unlink()
    with pytest.raises(ConfigError, match=r"there is no secret to sign session keys with.*ROLLYARD_SECRET"):
        await run_worker(crew.config, ["run"], 1, asyncio.Event())
    stop = asyncio.Event()
    stop.set()
    await run_worker(crew.config, ["aggregate"], 1, stop)  # needs none


async def test_a_backend_that_does_not_exist_is_a_wrong_setting(crew: Any) -> None:
    config = structs.replace(crew.config, worker=structs.replace(crew.config.worker, backends=("moon",)))
    with pytest.raises(ConfigError, match="no sandbox backend is called 'moon'"):
        await run_worker(config, ["run"], 1, asyncio.Event())


async def test_init_waits_while_enough_sandboxes_wait_for_run(crew: Any) -> None:
    worker = structs.replace(crew.config.worker, max_ready=3)
    crew.config = structs.replace(crew.config, worker=worker)
    await crew.submit(noop(1))
    for _ in range(3):
        await crew.bus.publish("stage.run.any.other", b"a sandbox is ready")
    async with crew.at_work("admit", "init"):

        async def admitted() -> bool:
            return await crew.due() == ["stage.init.none.r"] * 4

        await crew.until(admitted)
        await asyncio.sleep(0.5)
        assert await admitted()
        for message in await crew.take("run", "any", 3):
            await message.ack()

        async def ready() -> bool:
            return await crew.due() == ["stage.run.any.r"] * 4

        await crew.until(ready)


async def test_a_bus_that_cannot_tell_how_much_room_there_is_does_not_end_the_loop(crew: Any) -> None:
    tries = 0

    async def room() -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BusError("not now")
        return 5

    stop = asyncio.Event()

    async def handler(message: Delivered) -> Outcome:
        stop.set()
        return Ack()

    await crew.bus.publish("stage.init.none.r", b"x")
    spec = ConsumerSpec(stream=subjects.STAGES, name="init-none", filter_subject="stage.init.none.*")
    await ConsumerLoop(crew.bus, spec, handler, slots=1, room=room).run(stop)
    assert tries >= 2
    assert await crew.due() == []
