"""Running a watcher in the background, and waiting until it has caught up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def watching(watch: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> AsyncIterator[asyncio.Task[None]]:
    """Run `watch(ready)` until the block ends; enters when it sets `ready`, raises what it raises before that."""
    ready = asyncio.Event()
    task = asyncio.create_task(watch(ready))
    waiter = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield task
    finally:
        for job in (task, waiter):
            job.cancel()
            with suppress(asyncio.CancelledError):
                await job
