"""What the operator of a model server does to the requests that run in it: pauses, aborts, new weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

FIRST_VERSION: Final = "default"


class Running:
    """One request that is being answered."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.aborted = asyncio.Event()


class Control:
    """The state of a server that its operator sets. Paused, it takes no new request; held, those that run stop too."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self.checkpoint = ""
        self._open = asyncio.Event()
        self._open.set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[Running] = set()

    @property
    def paused(self) -> bool:
        """Whether new requests wait."""
        return not self._open.is_set()

    @asynccontextmanager
    async def running(self, rid: str) -> AsyncIterator[Running]:
        """Answer a request within the block, which begins once the server is not paused."""
        await self._open.wait()
        running = Running(rid)
        self._running.add(running)
        self._idle.clear()
        try:
            yield running
        finally:
            self._running.discard(running)
            if not self._running:
                self._idle.set()

    async def step(self, running: Running, pause_s: float) -> bool:
        """Let time pass, and wait while requests are held. Whether the request may go on: it was not aborted."""
        if pause_s and not running.aborted.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await running.aborted.wait()
        if not self._flowing.is_set() and not running.aborted.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._flowing, running.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not running.aborted.is_set()

    def abort(self, prefix: str = "") -> int:
        """Abort the requests whose ids begin so; returns how many."""
        found = [running for running in self._running if running.rid.startswith(prefix)]
        for running in found:
            running.aborted.set()
        return len(found)

    async def pause(self, *, abort: bool = False, hold: bool = False) -> None:
        """Take no new request. What runs is aborted, held or else finished; unless it is held, this waits for it."""
        self._open.clear()
        if hold:
            self._flowing.clear()
            return
        if abort:
            self.abort()
        await self._idle.wait()

    def resume(self) -> None:
        """Go on."""
        self._open.set()
        self._flowing.set()
