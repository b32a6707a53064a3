"""One reply on its way to one agent: writes that cannot hang for ever, and a sign of life where there is silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from rollyard.gateway.exchange import Update
from rollyard.gateway.protocols.protocol import ReplyStream
from rollyard.gateway.settings import GatewaySettings


class AgentStream:
    """A prepared response that updates are written to."""

    def __init__(self, response: web.StreamResponse, reply: ReplyStream, settings: GatewaySettings) -> None:
        self._response = response
        self._reply = reply
        self._write_timeout_s = settings.write_timeout_s
        self._ping_s = settings.ping_s
        self._written_s = time.monotonic()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, response: web.StreamResponse, reply: ReplyStream, settings: GatewaySettings
    ) -> AsyncIterator[AgentStream]:
        """A stream that is kept alive within the block."""
        stream = cls(response, reply, settings)
        pinging = asyncio.create_task(stream._ping_through_silence())
        try:
            yield stream
        finally:
            pinging.cancel()

    async def send(self, update: Update) -> None:
        """Write an update. Raises ConnectionError when the agent is gone, TimeoutError when it takes nothing."""
        data = self._reply.events(update)
        if data:
            self._written_s = time.monotonic()
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await self._response.write(data)

    async def _ping_through_silence(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._written_s + self._ping_s - time.monotonic()))
            if time.monotonic() - self._written_s >= self._ping_s:
                self._written_s = time.monotonic()
                try:
                    await self._response.write(self._reply.ping())
                except ConnectionError:
                    return
