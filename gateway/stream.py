"""One reply on its way to one agent: writes that cannot hang for ever, and a sign of life where there is silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from rollyard.gateway.exchange import Update
from rollyard.gateway.protocols.protocol import ReplyStream
from rollyard.gateway.settings import GatewaySettings


class AgentStream:
    """A prepared response that updates are written to."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, reply: ReplyStream, settings: GatewaySettings
    ) -> None:
        self._request = request
        self._response = response
        self._reply = reply
        self._write_timeout_s = settings.write_timeout_s
        self._ping_s = settings.ping_s
        self._written_s = time.monotonic()
        self._writing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, request: web.Request, response: web.StreamResponse, reply: ReplyStream, settings: GatewaySettings
    ) -> AsyncIterator[AgentStream]:
        """A stream that is kept alive within the block."""
        stream = cls(request, response, reply, settings)
        watching = asyncio.create_task(stream._watch())
        try:
            yield stream
        finally:
            watching.cancel()

    async def send(self, update: Update) -> None:
        """Write an update. Raises ConnectionError when the agent is gone, or has taken nothing for too long."""
        data = self._reply.events(update)
        if data:
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        self._written_s, self._writing = time.monotonic(), True
        try:
            await self._response.write(data)
        finally:
            self._writing = False

    async def _watch(self) -> None:
        """Ping where nothing was written for a while, and cut off an agent that does not take what was written.

        One timer for a stream: a timeout around each write would cost more than the write.
        """
        while True:
            limit_s = self._write_timeout_s if self._writing else self._ping_s
            left_s = self._written_s + limit_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, self._ping_s))
            elif self._writing:
                self._cut()
                return
            else:
                with suppress(ConnectionError):
                    await self._write(self._reply.ping())

    def _cut(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()
