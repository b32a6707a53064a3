"""Scripted rollouts through every role: each is delivered once, with the ids that the model server says it sampled."""

from __future__ import annotations

import time
from pathlib import Path

import outcome
import pytest
import world
from yard import ROLLOUTS, yard


@pytest.mark.timeout(900)
async def test_each_rollout_is_delivered_once_with_exact_ids(tmp_path: Path) -> None:
    rollouts = ROLLOUTS or 1000
    async with yard(tmp_path) as running:
        tasks = world.make_tasks(rollouts, ledger=running.ledger, group_size=8)
        started_s = time.perf_counter()
        await running.submit("b", tasks)
        await running.wait_delivered("b", rollouts, patience_s=600)
        took_s = time.perf_counter() - started_s
        result = await outcome.check(running, "b", tasks)
        assert len(result.samples) == rollouts
    print(f"\n{rollouts} scripted rollouts in {took_s:.1f} s, {rollouts / took_s:.1f} rollouts/s")
