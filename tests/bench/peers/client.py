"""A client that costs little: HTTP/1.1 by hand over kept connections, and the loads that it makes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, cast

CALL_TIMEOUT_S: Final = 60.0
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d+)")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass
class Reply:
    """What came back. Times in seconds, of time.perf_counter."""

    status: int = 0
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    body: bytes = b""
    error: str = ""


def request(path: str, headers: dict[str, str], body: bytes) -> bytes:
    """A POST as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class _Wire(asyncio.Protocol):
    """One connection, one reply at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._reply = Reply()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes, reply: Reply) -> asyncio.Future[None]:
        assert self.transport is not None
        self._reply, self._data, self._head = reply, bytearray(), b""
        self._parts: list[bytes] = []
        self._left, self._chunked = 0, False
        self._done = asyncio.get_running_loop().create_future()
        reply.sent_s = time.perf_counter()
        self.transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        reply.last_s = time.perf_counter()
        if not self._head:
            self._data += data
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            self._begin(bytes(self._data[: end + 2]))
            data, self._data = bytes(self._data[end + 4 :]), bytearray()
        if data and not reply.first_s:
            reply.first_s = reply.last_s
        if self._take(data):
            reply.body = b"".join(self._parts)
            self._finish("")

    def _begin(self, head: bytes) -> None:
        status, length = _STATUS.match(head), _LENGTH.search(head)
        self._head = head
        self._reply.status = int(status[1]) if status else 0
        self._chunked = _CHUNKED.search(head) is not None
        self._left = int(length[1]) if length else 0

    def _take(self, data: bytes) -> bool:
        """Whether the reply is complete with these bytes of its body."""
        if not self._chunked:
            self._parts.append(data)
            self._left -= len(data)
            return self._left <= 0
        self._data += data
        at = 0
        while True:
            end = self._data.find(b"\r\n", at)
            if end < 0:
                break
            size = int(self._data[at:end], 16)
            if len(self._data) < end + 4 + size:
                break
            self._parts.append(bytes(self._data[end + 2 : end + 2 + size]))
            at = end + 4 + size
            if not size:
                return True
        del self._data[:at]
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._finish(f"the connection was lost: {error or 'closed'}")

    def _finish(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._reply.error = error
            self._done.set_result(None)
        if self.transport is not None and _CLOSE.search(self._head):
            self.transport.close()
            self.transport = None


class Connection:
    """A connection to a peer, made anew when it was lost."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._wire: _Wire | None = None

    async def open(self) -> _Wire:
        """The connection, made where there is none. Raises OSError."""
        if self._wire is None or self._wire.transport is None:
            loop = asyncio.get_running_loop()
            _, self._wire = await loop.create_connection(_Wire, "127.0.0.1", self._port)
        return self._wire

    async def call(self, data: bytes, *, ends_with: bytes = b"") -> Reply:
        """Send a request and read its reply. A reply that is refused, cut or late has an `error`."""
        reply = Reply(sent_s=time.perf_counter())
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await (await self.open()).send(data, reply)
        except (OSError, TimeoutError) as error:
            reply.error = repr(error)
            self.close()
        if not reply.error and reply.status != 200:
            reply.error = f"status {reply.status}: {reply.body[:300]!r}"
        if not reply.error and ends_with not in reply.body[-200:]:
            reply.error = f"the reply ends with {reply.body[-60:]!r}"
        return reply

    def close(self) -> None:
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.abort()
        self._wire = None


@dataclass
class Load:
    """What a load came to; `seconds` from the first request to the last reply."""

    seconds: float
    replies: list[Reply] = field(default_factory=list)

    @property
    def good(self) -> list[Reply]:
        return [reply for reply in self.replies if not reply.error]

    @property
    def errors(self) -> list[str]:
        return [reply.error for reply in self.replies if reply.error]

    @property
    def rate(self) -> float:
        return len(self.good) / self.seconds

    def latencies_ms(self) -> list[float]:
        return sorted((reply.last_s - reply.sent_s) * 1e3 for reply in self.good)


Caller = Callable[[], bytes]
"""Gives a client's next request."""


async def closed_loop(
    clients: Iterable[tuple[Connection, Caller]], *, seconds: float, calls: int = 0, ends_with: bytes = b""
) -> Load:
    """Every client sends its next request when it has its reply.

    Requests begin for `seconds`, or as long as it takes to begin `calls` of them all together.
    """
    start_s = time.perf_counter()
    load, begun = Load(0.0), 0

    async def run(connection: Connection, caller: Caller) -> None:
        nonlocal begun
        while (begun < calls) if calls else (time.perf_counter() - start_s < seconds):
            begun += 1
            reply = await connection.call(caller(), ends_with=ends_with)
            reply.body = b""
            load.replies.append(reply)

    async with asyncio.TaskGroup() as group:
        for connection, caller in clients:
            group.create_task(run(connection, caller))
    load.seconds = time.perf_counter() - start_s
    return load


async def open_streams(clients: Iterable[tuple[Connection, Caller]], *, ends_with: bytes) -> Load:
    """One stream a client, all opened at once."""
    start_s = time.perf_counter()
    load = Load(0.0)

    async def run(connection: Connection, caller: Caller) -> None:
        reply = await connection.call(caller(), ends_with=ends_with)
        reply.body = b""
        load.replies.append(reply)

    async with asyncio.TaskGroup() as group:
        for connection, caller in clients:
            group.create_task(run(connection, caller))
    load.seconds = time.perf_counter() - start_s
    return load
