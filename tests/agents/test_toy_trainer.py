"""The example trainer against real stages: three rounds in a process of its own, as the documentation starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import rollyard

TRAINER = Path(__file__).resolve().parents[2] / "docs/examples/toy_trainer.py"
RUN = "toy-whole"
ROUNDS, TASKS, GROUP_SIZE = 3, 2, 4


def train(installation: Any) -> list[str]:
    env = os.environ | {"ROLLYARD_CONFIG": str(installation.data / "config.toml")}
    done = subprocess.run(
        [sys.executable, str(TRAINER), "--run", RUN], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def test_three_rounds_on_whole_groups(installation: Any) -> None:
    lines = train(installation)
    assert [line.split(", ")[:3] for line in lines] == [
        [f"round {number}: {TASKS} groups", f"{TASKS * GROUP_SIZE} rollouts", "mean reward 0.50"]
        for number in range(1, ROUNDS + 1)
    ]
    async with rollyard.connect(installation.nats, run=RUN, blobs=installation.data / "blobs") as client:
        assert await client.policy_version() == ROUNDS
        groups = client.groups(durable="checker")
        batches = [await anext(groups) for _ in range(ROUNDS * TASKS)]
        assert {batch.group.task_id for batch in batches} == {
            f"round-{number}-{task}" for number in range(1, ROUNDS + 1) for task in range(TASKS)
        }
        for batch in batches:
            assert [delivery.index for delivery in batch.deliveries] == list(range(GROUP_SIZE))
            assert {delivery.status for delivery in batch.deliveries} == {"completed"}
            assert all(len(delivery.samples) == 1 for delivery in batch.deliveries)
    assert train(installation) == []
