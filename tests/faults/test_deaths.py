"""Processes that end politely, stand still for a while, or die in the middle of a stream; and a bus that is away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import outcome
import pytest
import pytest_asyncio
import world
from yard import ROLES, Yard, yard

from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.rollout import RolloutState

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Yard]:
    async with yard(tmp_path_factory.mktemp("yard")) as started:
        yield started


async def positions(running: Yard, run: str) -> list[str]:
    """Where the rollouts of a run stand."""
    bucket: Bucket[RolloutState] = Bucket(running.bus, subjects.ROLLOUTS, RolloutState)
    return [state.position async for _, state, _ in bucket.items(f"{subjects.token(run)}.*")]


async def test_sigterm_of_each_role_under_load_loses_nothing(running: Yard) -> None:
    tasks = world.make_tasks(72, ledger=running.ledger, words=("", world.STREAMING))
    await running.submit("polite", tasks)
    for number, role in enumerate(ROLES, 1):
        await running.wait_delivered("polite", 72 * number // (len(ROLES) + 2))
        assert await running.stop(role) == 0, running.tail(role)
        running.again(role)
    await outcome.check(running, "polite", tasks)


async def test_a_run_worker_that_stood_still_does_no_harm(running: Yard) -> None:
    tasks = world.make_tasks(12, ledger=running.ledger, words=(world.SLOWLY,))
    await running.submit("zombie", tasks)

    async def at_work() -> bool:
        return running.ledger.exists() and (await positions(running, "zombie")).count("run") == 12

    await running.until(at_work, "agents at work")
    running.signal("run", signal.SIGSTOP)
    running.start("run-too", "worker", "--stages", "run")
    try:
        await running.wait_delivered("zombie", 12)
    finally:
        running.signal("run", signal.SIGCONT)
    await outcome.check(running, "zombie", tasks)
    assert '"event": "reattached"' in (running.folder / "run-too.log").read_text()
    assert await running.stop("run-too") == 0


async def test_a_gateway_killed_in_the_middle_of_streams(running: Yard) -> None:
    # The first two of four tasks ask for streams.
    tasks = world.make_tasks(16, ledger=running.ledger, words=(world.STREAMING,))
    await running.submit("stream", tasks)

    async def streams() -> bool:
        logged = await running.bus.subjects(subjects.LOG, subjects.log_subject("stream", "*", "call"))
        return sum(count % 2 for count in logged.values()) > 4  # an intent without its end

    await running.until(streams, "calls in flight")
    await asyncio.sleep(0.5)
    await running.kill("gateway")
    running.again("gateway")
    result = await outcome.check(running, "stream", tasks)
    assert sum(delivery.calls for delivery in result.deliveries) > 16 * world.CALLS


async def test_a_bus_that_is_away_for_longer_than_the_leases_kills_nobody(running: Yard) -> None:
    tasks = world.make_tasks(12, ledger=running.ledger, words=(world.SLOWLY,))
    await running.submit("away", tasks)

    async def at_work() -> bool:
        return "run" in await positions(running, "away")

    await running.until(at_work, "agents at work")
    await running.kill("nats")
    await asyncio.sleep(running.config.worker.lease_s + 2)
    running.start_nats()
    await outcome.check(running, "away", tasks)


async def test_a_controller_that_stood_still_for_longer_than_the_leases_kills_nobody(running: Yard) -> None:
    tasks = world.make_tasks(12, ledger=running.ledger, words=(world.FOREVER,))
    await running.submit("still", tasks)

    async def at_work() -> bool:
        return (await positions(running, "still")).count("run") == 12

    await running.until(at_work, "agents at work")
    running.signal("controller", signal.SIGSTOP)
    await asyncio.sleep(running.config.worker.lease_s + 2)
    running.signal("controller", signal.SIGCONT)
    await asyncio.sleep(3)
    assert (await positions(running, "still")).count("run") == 12
