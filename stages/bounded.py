"""Calling code of the user's own: sync or async, within a time limit, and without ever standing in the worker's way."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from rollyard.schemas.errors import SetupError

MAX_THREADS: Final = 64
"""Calls of sync code at a time in one process, those that hang for ever among them."""
FAREWELL_S: Final = 5.0
"""How long a call that is cancelled may take to end before it is left to itself."""


class TooSlow(TimeoutError):
    """A call took longer than its time limit."""


_room = threading.BoundedSemaphore(MAX_THREADS)


async def call(function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Any:
    """What `function` returns; a plain one runs in a thread of its own.

    Raises TooSlow after `timeout_s`, None: never; an async call is then cancelled, a thread is left to itself, since
    nobody can end it. Raises SetupError when too many threads were left so, and whatever the function raises.
    """
    if inspect.iscoroutinefunction(function):
        task = asyncio.ensure_future(_kept_in(function, arguments))
    else:
        task = asyncio.ensure_future(_in_thread(function, arguments))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            await _leave(task)
    if task.cancelled() or not task.done():
        raise TooSlow(f"it took longer than {timeout_s:g} s")
    return task.result()


async def _kept_in(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Await it; what would end the whole process is an error like any other."""
    try:
        return await function(*arguments)
    except (SystemExit, KeyboardInterrupt) as ending:
        raise RuntimeError(f"it raised {ending!r}") from ending


async def _leave(task: asyncio.Future[Any]) -> None:
    """Cancel a call; one that does not want to end is left to itself."""
    task.cancel()
    await asyncio.wait({task}, timeout=FAREWELL_S)
    if not task.done():
        task.add_done_callback(_look)


def _look(task: asyncio.Future[Any]) -> None:
    """Take note of the end of a call for which nobody waits any more."""
    if not task.cancelled():
        task.exception()


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run it in a daemon thread: one that hangs neither takes a place in a pool nor holds up the end of the process."""
    if not _room.acquire(blocking=False):
        raise SetupError(
            f"{MAX_THREADS} calls of hooks or handlers hang", hint="let them end by themselves, or be async"
        )
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(value)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function(*arguments)
        except BaseException as raised:  # noqa: BLE001 - the boundary: whatever it is belongs to the caller
            # A future cannot hold StopIteration, and nobody but us may end the process.
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if plain else RuntimeError(f"it raised {raised!r}")
        finally:
            _room.release()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, daemon=True, name="rollyard-call").start()
    return await ended
