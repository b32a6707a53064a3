"""Which sessions are closed: the `sessions` bucket followed. A key that stands there means closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects


class ClosedSessions:
    """`on_close` is called with the key of each session when it is closed. `run()` must be running."""

    def __init__(self, bus: Bus, on_close: Callable[[str], None]) -> None:
        # Presence alone counts, whatever the value.
        self._bucket: Bucket[Any] = Bucket(bus, subjects.SESSIONS, Any)
        self._closed: set[str] = set()
        self._on_close = on_close
        self.ready = asyncio.Event()

    def __contains__(self, session: str) -> bool:
        return session in self._closed

    async def run(self) -> None:
        """Follow the bucket until cancelled; `ready` is set once everything that stands there is known."""
        async for key, value, _ in self._bucket.watch():
            if not key:
                self.ready.set()
            elif value is None:
                self._closed.discard(key)
            elif key not in self._closed:
                self._closed.add(key)
                self._on_close(key)
