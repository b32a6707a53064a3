"""Calls of the user's own code end in time, whatever that code does."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from rollyard.schemas.errors import SetupError
from rollyard.stages import bounded
from rollyard.stages.bounded import TooSlow, call


async def test_sync_and_async_give_what_they_return_and_raise() -> None:
    async def twice(number: int) -> int:
        return 2 * number

    def fail(number: int) -> None:
        raise KeyError(number)

    assert await call(twice, 4, timeout_s=5) == 8
    assert await call(lambda number: number + 1, 4, timeout_s=5) == 5
    with pytest.raises(KeyError):
        await call(fail, 1, timeout_s=5)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call(lambda: next(iter(())), timeout_s=5)


async def test_nothing_that_it_raises_ends_the_process() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    def leave_too() -> None:
        raise KeyboardInterrupt

    for function in (leave, leave_too):
        with pytest.raises(RuntimeError, match="it raised"):
            await call(function, timeout_s=5)


async def test_the_loop_goes_on_while_a_thread_stands_still() -> None:
    go_on = threading.Event()
    waiting = asyncio.create_task(call(go_on.wait, timeout_s=30))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    go_on.set()
    assert await waiting is True


async def test_a_call_that_takes_too_long_is_cancelled_or_left() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    go_on = threading.Event()
    for function in (hang, go_on.wait):
        with pytest.raises(TooSlow, match=r"longer than 0\.05 s"):
            await call(function, timeout_s=0.05)
    assert cancelled.is_set()
    go_on.set()


async def test_a_call_that_does_not_want_to_end_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "FAREWELL_S", 0.1)
    ended = asyncio.Event()

    async def stubborn() -> None:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        ended.set()
        raise ValueError("nobody hears this")

    with pytest.raises(TooSlow):
        await call(stubborn, timeout_s=0.05)
    assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_cancel_from_outside_reaches_the_call() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(call(hang, timeout_s=None))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_threads_that_hang_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_room", threading.BoundedSemaphore(2))
    go_on = threading.Event()
    hanging: list[Any] = [asyncio.create_task(call(go_on.wait, timeout_s=30)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(SetupError, match="calls of hooks or handlers hang"):
        await call(go_on.wait, timeout_s=30)
    go_on.set()
    for task in hanging:
        assert await task
    assert await call(lambda: 1, timeout_s=5) == 1
