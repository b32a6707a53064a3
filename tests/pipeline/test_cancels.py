"""Cancels: known from the bucket, and a scope that ends work at its next await."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.cancels import Cancelled, Cancels
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.watching import watching
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.rollout import Rollout

ONE = Rollout.of("a run", "a task", 1, 4)
TWO = Rollout.of("a run", "a task", 2, 4)
OTHER = Rollout.of("a run", "another", 1, 4)


async def cancel(bus: Bus, *what: Any, reason: str = "enough") -> None:
    await Bucket(bus, subjects.CANCEL, Cancel).put(subjects.cancel_key(*what), Cancel(reason=reason))


async def known(cancels: Cancels, rollout: Rollout) -> None:
    while cancels.find(rollout) is None:  # noqa: ASYNC110 - written elsewhere
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("what", "hit"),
    [
        (("a run",), [ONE, TWO, OTHER]),
        (("a run", "a task"), [ONE, TWO]),
        (("a run", "a task", 1), [ONE]),
        (("another run",), []),
    ],
)
async def test_what_was_cancelled_before_is_known(bus: Bus, what: tuple[Any, ...], hit: list[Rollout]) -> None:
    await cancel(bus, *what)
    async with Cancels.following(bus) as cancels:
        assert [rollout for rollout in (ONE, TWO, OTHER) if cancels.find(rollout)] == hit


async def test_work_ends_at_its_next_await_and_only_that_work(bus: Bus) -> None:
    steps: list[str] = []

    async def work(rollout: Rollout) -> str:
        try:
            with cancels.scope(rollout):
                steps.append("began")
                try:
                    await asyncio.sleep(600 if rollout == ONE else 0.5)
                finally:
                    await asyncio.sleep(0)  # cleaning up may await
                    steps.append("cleaned up")
        except Cancelled:
            return "cancelled"
        return "done"

    async with Cancels.following(bus) as cancels, asyncio.TaskGroup() as group:
        first, second = group.create_task(work(ONE)), group.create_task(work(TWO))
        while steps.count("began") < 2:  # noqa: ASYNC110 - begun elsewhere
            await asyncio.sleep(0)
        await cancel(bus, "a run", "a task", 1)
        assert await first == "cancelled"
        assert await second == "done"
        # Later work of a cancelled rollout does not begin.
        assert await work(ONE) == "cancelled"
    assert steps.count("began") == 2


async def test_a_scope_leaves_the_task_as_it_was(bus: Bus) -> None:
    async with Cancels.following(bus) as cancels:

        async def work() -> int:
            try:
                with cancels.scope(ONE):
                    await asyncio.sleep(600)
            except Cancelled:
                pass
            # Timeouts and further awaits work as if nothing had been.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.sleep(600)
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        await cancel(bus, "a run")
        assert await working == 0


async def test_a_timeout_inside_and_a_cancel_from_outside_stay_what_they_are(bus: Bus) -> None:
    async with Cancels.following(bus) as cancels:
        with pytest.raises(TimeoutError), cancels.scope(ONE):
            async with asyncio.timeout(0.05):
                await asyncio.sleep(600)

        async def work() -> None:
            with cancels.scope(ONE):
                await asyncio.sleep(600)

        stopped = asyncio.create_task(work())
        await asyncio.sleep(0)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped

        both = asyncio.create_task(work())
        await asyncio.sleep(0)
        cancels._end(subjects.cancel_key("a run"))
        both.cancel()
        # The worker stops: it must not log that the user cancelled.
        with pytest.raises(asyncio.CancelledError):
            await both


async def test_a_cancel_can_be_taken_back(bus: Bus) -> None:
    await cancel(bus, "a run")
    async with Cancels.following(bus) as cancels:
        await Bucket(bus, subjects.CANCEL, Cancel).delete(subjects.cancel_key("a run"))
        while cancels.find(ONE) is not None:  # noqa: ASYNC110 - deleted elsewhere
            await asyncio.sleep(0.01)
        with cancels.scope(ONE):
            await asyncio.sleep(0)


async def test_a_record_that_cannot_be_read_hides_no_other(bus: Bus) -> None:
    async with Cancels.following(bus) as cancels:
        await bus.publish(subjects.kv_subject(subjects.CANCEL, "x"), b"")
        await bus.publish(subjects.kv_subject(subjects.CANCEL, "y"), b"just do it")
        await bus.publish(subjects.kv_subject(subjects.CANCEL, subjects.cancel_key("a run")), b'{"reason": "JSON"}')
        await known(cancels, ONE)
        found = cancels.find(ONE)
        assert found is not None
        assert found.reason == "JSON"


async def test_a_watcher_that_breaks_ends_the_block_that_relies_on_it() -> None:
    async def breaks(ready: asyncio.Event) -> None:
        ready.set()
        await asyncio.sleep(0.05)
        raise RuntimeError("cannot follow any more")

    with pytest.raises(RuntimeError, match="cannot follow any more"):
        async with watching(breaks):
            await asyncio.sleep(600)

    async def breaks_at_once(ready: asyncio.Event) -> None:
        raise RuntimeError("cannot even begin")

    with pytest.raises(RuntimeError, match="cannot even begin"):
        async with watching(breaks_at_once):
            pytest.fail("entered without a view")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
