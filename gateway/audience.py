"""Those who wait for one call's reply: the agent, and whoever has joined it since."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from rollyard.gateway.exchange import Finished, Update
from rollyard.gateway.refusal import Refusal


class Audience:
    """Everybody hears everything, whenever they came. `on_empty` is called when the last one leaves before the end."""

    def __init__(self, on_empty: Callable[[], None]) -> None:
        self._on_empty = on_empty
        self._said: list[Update | Refusal] = []
        self._listeners: set[asyncio.Queue[Update | Refusal]] = set()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def say(self, update: Update | Refusal) -> None:
        """Tell all who listen, and who will."""
        self._said.append(update)
        for queue in self._listeners:
            queue.put_nowait(update)

    async def listen(self) -> AsyncGenerator[Update, None]:
        """All updates from the first one on, up to `Finished`. Raises the Refusal that was said."""
        queue: asyncio.Queue[Update | Refusal] = asyncio.Queue()
        for update in self._said:
            queue.put_nowait(update)
        self._listeners.add(queue)
        try:
            while True:
                update = await queue.get()
                if isinstance(update, Refusal):
                    raise update
                yield update
                if isinstance(update, Finished):
                    return
        finally:
            self._listeners.discard(queue)
            if not self._listeners:
                self._on_empty()
