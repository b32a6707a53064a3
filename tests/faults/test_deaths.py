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

from rollyard.pipeline.client import Client
from rollyard.schemas import subjects

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Yard]:
    async with yard(tmp_path_factory.mktemp("yard")) as started:
        yield started


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
    begun = running.commands_begun()
    await running.submit("zombie", tasks)
    await running.wait_commands(begun + 1)
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
    tasks = world.make_tasks(8, ledger=running.ledger, words=(world.STREAMING,))
    assert all(task.agent.args["stream"] for task in tasks)
    await running.submit("stream", tasks)

    async def streams() -> bool:
        logged = await running.bus.subjects(subjects.LOG, subjects.log_subject("stream", "*", "call"))
        return list(logged.values()).count(1) >= 2  # only the intent of the first call, which takes long

    await running.until(streams, "calls in flight")
    await asyncio.sleep(0.3)
    await running.kill("gateway")
    running.again("gateway")
    result = await outcome.check(running, "stream", tasks)
    assert sum(delivery.calls for delivery in result.deliveries) > 8 * world.CALLS


async def test_a_bus_that_is_away_for_longer_than_the_leases_kills_nobody(running: Yard) -> None:
    tasks = world.make_tasks(12, ledger=running.ledger, words=(world.SLOWLY,))
    begun = running.commands_begun()
    await running.submit("away", tasks)
    await running.wait_commands(begun + 1)
    await running.kill("nats")
    await asyncio.sleep(running.config.worker.lease_s + 2)
    running.start_nats()
    await outcome.check(running, "away", tasks)


async def test_a_controller_that_stood_still_for_longer_than_the_leases_kills_nobody(running: Yard) -> None:
    tasks = world.make_tasks(12, ledger=running.ledger, words=(world.FOREVER,))
    await running.submit("still", tasks)
    await running.wait_positions("still", "run", 12)
    running.signal("controller", signal.SIGSTOP)
    await asyncio.sleep(running.config.worker.lease_s + 2)
    running.signal("controller", signal.SIGCONT)
    await asyncio.sleep(3)
    await running.wait_positions("still", "run", 12)
    await Client(running.bus, "still").cancel()
    result = await outcome.check_ended(running, "still", tasks)
    assert {(delivery.status, delivery.attempt) for delivery in result.deliveries} == {("cancelled", 1)}
