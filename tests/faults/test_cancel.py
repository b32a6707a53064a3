"""Cancels reach rollouts wherever they are: each is delivered as cancelled, without samples, and its group closes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import outcome
import pytest
import pytest_asyncio
import world
from yard import Yard, yard

from rollyard.pipeline.client import Client
from rollyard.schemas.task import Task

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Yard]:
    async with yard(tmp_path_factory.mktemp("yard")) as started:
        yield started


async def check_cancelled(running: Yard, run: str, tasks: Sequence[Task]) -> outcome.Outcome:
    """All of a run was cancelled for the reason `enough`."""
    result = await outcome.check_ended(running, run, tasks)
    for delivery in result.deliveries:
        assert delivery.status == "cancelled"
        assert delivery.failure is not None
        assert (delivery.failure.kind, delivery.failure.message) == ("cancelled", "enough")
        assert (delivery.reward, delivery.samples) == (None, ())
    return result


async def agents_at_work(running: Yard, count: int) -> None:
    async def at_work() -> bool:
        return sum("sleep 600" in line and "echo" not in line for line in running.agents()) >= count

    await running.until(at_work, f"{count} agents at work")


async def test_a_running_rollout_then_the_rest_of_its_task(running: Yard) -> None:
    tasks = world.make_tasks(3, ledger=running.ledger, words=(world.FOREVER,))
    await running.submit("running", tasks)
    await agents_at_work(running, 3)
    client = Client(running.bus, "running")
    await client.cancel(tasks[0].id, 1, reason="enough")
    await running.wait_delivered("running", 1)
    first = (await outcome.read(running, "running")).deliveries
    assert [(delivery.index, delivery.status) for delivery in first] == [(1, "cancelled")]
    await agents_at_work(running, 2)
    await client.cancel(tasks[0].id, reason="enough")
    await check_cancelled(running, "running", tasks)


async def test_rollouts_that_nobody_holds(running: Yard) -> None:
    tasks = world.make_tasks(8, ledger=running.ledger)
    assert await running.stop("run") == 0
    await running.submit("queued", tasks)

    await running.wait_positions("queued", "run", 8)
    await Client(running.bus, "queued").cancel(reason="enough")
    await running.wait_delivered("queued", 8)
    running.again("run")
    await check_cancelled(running, "queued", tasks)


async def test_a_whole_run_with_tasks_that_come_after_the_cancel(running: Yard) -> None:
    tasks = world.make_tasks(12, ledger=running.ledger, words=(world.FOREVER,))
    await running.submit("whole", tasks[:2])
    await agents_at_work(running, 8)
    await Client(running.bus, "whole").cancel(reason="enough")
    await running.submit("whole", tasks[2:])
    await check_cancelled(running, "whole", tasks)


async def test_what_has_ended_stays_as_it_is(running: Yard) -> None:
    tasks = world.make_tasks(4, ledger=running.ledger)
    await running.submit("late", tasks)
    await running.wait_delivered("late", 4)
    await Client(running.bus, "late").cancel(reason="enough")
    await outcome.check(running, "late", tasks)
