"""The example trainer, against stages that deliver at once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.consumer import Ack, ConsumerLoop, Outcome
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.groups import close_if_complete
from rollyard.pipeline.pull import Delivered
from rollyard.pipeline.streams import ConsumerSpec
from rollyard.pipeline.taskfile import decode_task
from rollyard.schemas import subjects
from rollyard.schemas.sample import Delivery

TRAINER = Path(__file__).resolve().parents[2] / "docs/examples/toy_trainer.py"
RUN = "toy"


async def train(url: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, TRAINER, "--url", url, "--run", RUN, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


async def test_three_rounds_then_nothing_left_to_do(bus: Bus, nats: EmbeddedNats) -> None:
    ids: list[str] = []

    async def deliver(message: Delivered) -> Outcome:
        """All stages at once: every second rollout is right."""
        task = decode_task(await message.body())
        ids.append(task.id)
        for index in range(task.group_size):
            made = Delivery(
                run=RUN,
                task_id=task.id,
                group_id=task.id,
                group_size=task.group_size,
                rollout_id=subjects.rollout_id(RUN, task.id, index),
                index=index,
                attempt=1,
                status="completed",
                reward=float(index % 2),
            )
            await bus.create(subjects.sample_subject(RUN, task.id, index), encode(made))
        assert await close_if_complete(bus, RUN, task.id, task.group_size)
        return Ack()

    spec = ConsumerSpec(stream=subjects.TASKS, name="stages", filter_subject=subjects.task_subject(RUN))
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(ConsumerLoop(bus, spec, deliver, slots=4).run(stop))
        lines = await train(nats.url)
        again = await train(nats.url)
        stop.set()
    assert [line.partition(",")[0] for line in lines] == [f"round {number}: 2 groups" for number in (1, 2, 3)]
    assert all("8 rollouts, mean reward 0.50" in line for line in lines)
    assert sorted(ids) == [f"round-{number}-{task}" for number in (1, 2, 3) for task in (0, 1)]
    assert again == []
