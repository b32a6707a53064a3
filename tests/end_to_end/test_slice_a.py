"""The pipeline alone: rollouts in which nothing is done, each delivered once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from yard import config_for, yard

from rollyard.pipeline.codec import decode
from rollyard.schemas import subjects
from rollyard.schemas.rollout import Rollout
from rollyard.schemas.sample import Delivery
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task

ROLLOUTS = 2000
GROUP_SIZE = 8


@pytest.mark.timeout(600)
async def test_two_thousand_rollouts_are_each_delivered_once(tmp_path: Path) -> None:
    tasks = [
        Task(
            id=f"t{number}",
            prompt="nothing to do",
            group_size=GROUP_SIZE,
            agent=AgentSpec(harness="noop"),
            sandbox=SandboxSpec(backend="none"),
        )
        for number in range(ROLLOUTS // GROUP_SIZE)
    ]
    wanted = {Rollout.of("a", task.id, index, GROUP_SIZE).rollout_id for task in tasks for index in range(GROUP_SIZE)}
    async with yard(tmp_path, config=config_for(tmp_path, backends=("none",))) as running:
        await running.submit("a", tasks)
        await running.wait_delivered("a", ROLLOUTS, patience_s=400)
        found = running.bus.read(subjects.SAMPLES, "sample.a.*.*")
        deliveries = [decode(stored.data, Delivery) async for stored in found]
        assert Counter(each.rollout_id for each in deliveries) == Counter(wanted)
        assert {(each.status, each.attempt, len(each.samples)) for each in deliveries} == {("completed", 1, 1)}

        async def all_closed() -> bool:
            return len(await running.bus.subjects(subjects.SAMPLES, "group.a.*")) == len(tasks)

        await running.until(all_closed, "the end of every group")
        commits = await running.bus.subjects(subjects.LOG, "log.a.*.commit")
        assert Counter(commits.values()) == {1: ROLLOUTS}
