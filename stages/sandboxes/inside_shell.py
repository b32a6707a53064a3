"""The pipe of a persistent shell in a sandbox that is entered from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.inside_channel import Stream


class StreamPipe:
    """A `Pipe` over one stream. `interrupt` and `kill` act from inside the sandbox, on all that the shell started."""

    def __init__(
        self, stream: Stream, *, interrupt: Callable[[], Awaitable[None]], kill: Callable[[], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._interrupt = interrupt
        self._kill = kill
        self._closed = False

    async def write(self, data: bytes) -> None:
        """To its standard input. Raises SandboxError when it is gone."""
        await self._stream.write(data)

    async def read(self) -> bytes:
        """What it has written since; empty at its end."""
        piece = await self._stream.read()
        return b"" if piece is None else piece[1]

    async def interrupt(self) -> None:
        """SIGINT to its process group."""
        await self._interrupt()

    async def close(self) -> None:
        """Kill it and everything that it started. Does nothing the second time, and when the sandbox is gone."""
        if self._closed:
            return
        self._closed = True
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        with suppress(SandboxError):
            await self._kill()
        await self._stream.close()
