"""A bound on bytes that are under way and not yet acknowledged."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """First come, first served. A claim larger than the whole budget passes alone.

    Large messages in flight hurt more than they help, small ones do not: so the bound is on bytes and not on messages.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> int:
        """Take up to `size` bytes of the budget, waiting until they are free; give back what is returned."""
        size = min(size, self.max_bytes)
        if not self._waiting and self.used_bytes + size <= self.max_bytes:
            self.used_bytes += size
            return size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)
            raise
        return size

    def release(self, size: int) -> None:
        """Give back what `acquire` returned."""
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
