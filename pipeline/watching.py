"""Running a watcher in the background, and waiting until it has caught up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def watching(watch: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run `watch(ready)` until the block ends; enters when it sets `ready`.

    What it raises ends the block and is raised there: nobody shall go on with an old view.
    """
    owner = asyncio.current_task()
    assert owner is not None
    ready = asyncio.Event()
    entered = broken = False

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal broken
        ready.set()
        if entered and not task.cancelled():
            broken = True
            owner.cancel()

    task = asyncio.create_task(watch(ready))
    task.add_done_callback(ended)
    try:
        await ready.wait()
        if task.done():
            await task
        entered = True
        yield
    except asyncio.CancelledError:
        if broken and owner.uncancel() == 0:
            task.result()
        raise
    finally:
        entered = False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
