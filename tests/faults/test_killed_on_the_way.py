"""Every process killed with -9 once while a run is on its way, and started again: nothing is lost, nothing is twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import outcome
import pytest
import world
from yard import ROLLOUTS, Yard, yard

IN_THIS_ORDER = ("run", "gateway", "aggregate", "sink", "nats", "admit", "init", "eval", "controller")


@pytest.mark.timeout(1500)
async def test_each_process_killed_once_under_way(tmp_path: Path) -> None:
    rollouts = ROLLOUTS or 240
    async with yard(tmp_path) as running:
        tasks = world.make_tasks(rollouts, ledger=running.ledger, group_size=8, words=("", world.STREAMING))
        started_s = time.perf_counter()
        await running.submit("d", tasks)
        for number, name in enumerate(IN_THIS_ORDER, 1):
            at = rollouts * number // (len(IN_THIS_ORDER) + 2)
            await running.wait_delivered("d", at, patience_s=300)
            await kill_and_start(running, name)
        await running.wait_delivered("d", rollouts, patience_s=600)
        took_s = time.perf_counter() - started_s
        result = await outcome.check(running, "d", tasks)
    print(f"\n{rollouts} rollouts, {len(IN_THIS_ORDER)} kills: {took_s:.1f} s, {rollouts / took_s:.1f} rollouts/s")
    print(f"calls made again: {sum(delivery.calls for delivery in result.deliveries) - world.CALLS * rollouts}")


async def kill_and_start(running: Yard, name: str) -> None:
    await running.kill(name)
    await asyncio.sleep(0.5)
    running.again(name)
