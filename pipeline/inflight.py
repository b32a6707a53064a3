"""A bound on bytes that are under way and not yet acknowledged."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """First come, first served. A claim larger than the whole budget passes alone.

    Large messages in flight hurt more than they help, small ones do not: so the bound is on bytes and not on messages.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def claim(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes of the budget; waits until they are free."""
        size = min(size, self.max_bytes)
        if self._waiting or self.used_bytes + size > self.max_bytes:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(size)
                raise
        else:
            self.used_bytes += size
        try:
            yield
        finally:
            self._release(size)

    def _release(self, size: int) -> None:
        self.used_bytes -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if self.used_bytes + wanted > self.max_bytes:
                return
            self._waiting.popleft()
            self.used_bytes += wanted
            turn.set_result(None)
