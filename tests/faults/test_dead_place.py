"""A place all of whose workers die for good: its rollouts go on at another place, in a new attempt."""

from __future__ import annotations

from pathlib import Path

import outcome
import pytest
import world
from yard import Yard, config_for, yard

from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Lease

BACKEND = "other_place:OtherPlace"


ELSEWHERE = ("gateway", "controller", "sink", "admit", "aggregate")


def start_node(running: Yard, place: str) -> Path:
    """A worker that makes sandboxes at a place of its own; returns their folder."""
    running.start(f"node-{place}", "worker", "--stages", "init,run,eval", env=at(place, running.folder))
    return running.config.sandboxes_dir() / place


def at(place: str, folder: Path) -> dict[str, str]:
    """The environment by which a process is at a place."""
    return {"PYTHONPATH": str(Path(__file__).parent), "TEST_PLACE": place, "TEST_FOLDER": str(folder)}


@pytest.mark.timeout(400)
async def test_rollouts_of_a_dead_place_move_to_another(tmp_path: Path) -> None:
    config = config_for(tmp_path, backends=(BACKEND,))
    env = at("elsewhere", tmp_path)
    async with yard(tmp_path, ELSEWHERE, config=config, env=env) as running:
        start_node(running, "x")
        tasks = world.make_tasks(8, ledger=running.ledger, words=(world.ONCE_FOREVER,), backend=BACKEND)
        await running.submit("moved", tasks)
        await running.wait_commands(8)
        there = start_node(running, "y")
        await running.kill("node-x")
        await outcome.check(running, "moved", tasks, attempt=2, swept=False)
        await outcome.check_no_sandbox_is_left(there, running)

        async def forgotten() -> bool:
            leases = Bucket[Lease](running.bus, subjects.NODES, Lease)
            consumers = (await running.bus.api(f"CONSUMER.NAMES.{subjects.STAGES}", {}))["consumers"]
            return [key async for key, _, _ in leases.items()] == ["y"] and "run-x" not in consumers

        await running.until(forgotten, "the dead place to be forgotten")
