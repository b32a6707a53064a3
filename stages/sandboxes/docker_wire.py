"""Talking to the Docker engine over a connection of our own, where docker-py cannot: a running program's input and
output, without a thread for each and without losing what comes right behind the answer's head; and builds that end when
they are cancelled.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.stages.sandboxes.inside_channel import StreamName

CONNECT_S: Final = 30.0
ANSWER_S: Final = 120.0
_READ_BYTES: Final = 1 << 18
_BUFFER_BYTES: Final = 1 << 20
_FRAME_HEAD_BYTES: Final = 8
_UPGRADED: Final = (101, 200)


class EngineRefused(SandboxError):
    """The engine's answer was an error. `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the docker engine says: {message}")
        self.status = status
        self.said = message


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens: `unix:///path` or `tcp://host:port`, the latter with TLS when there is `certificates`,
    a folder with ca.pem, cert.pem and key.pem."""

    url: str
    certificates: str = ""

    def check(self) -> None:
        """Raises ConfigError for an address that is of another kind."""
        parts = urlsplit(self.url)
        if not (parts.scheme == "unix" and parts.path) and not (parts.scheme == "tcp" and parts.hostname):
            raise ConfigError(
                f"sandbox backend docker: base_url {self.url!r} is no address of an engine",
                hint="write unix:///path/of/docker.sock or tcp://host:port",
            )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection. Raises SandboxError."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=loop)
        protocol = _Protocol(reader, loop=loop)
        transport: Any
        try:
            async with asyncio.timeout(CONNECT_S):
                if parts.scheme == "unix":
                    transport, _ = await loop.create_unix_connection(lambda: protocol, parts.path)
                else:
                    port = parts.port or (2376 if self.certificates else 2375)
                    transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=self._tls())
        except (OSError, TimeoutError) as error:
            raise away(self.url, error) from error
        return reader, _Writer(transport, protocol, reader, loop)

    def _tls(self) -> ssl.SSLContext | None:
        if not self.certificates:
            return None
        folder = Path(self.certificates)
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        return context


def away(url: str, error: Exception) -> SandboxError:
    """What is raised when the engine cannot be reached."""
    return SandboxError(
        f"the docker engine at {url} cannot be reached: {error or type(error).__name__}",
        hint="is it running, and may this user open its socket? `docker info` tells; see [backends.docker] base_url",
    )


class _Protocol(asyncio.StreamReaderProtocol):
    """Closes the connection when the engine closes its side: a container that ended reads nothing more."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _Writer(asyncio.StreamWriter):
    """Closed with the last who knew it, without a warning: nobody closes a sandbox that lives on."""

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.transport.close()


class Wire:
    """One connection, for one request after another until one is upgraded."""

    def __init__(self, address: EngineAddress, version: str) -> None:
        self._address = address
        self._version = version
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()

    def close(self) -> None:
        """Close all connections that are still open."""
        for connection in list(self._open):
            connection.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Connection]:
        """A connection for the block. Raises SandboxError."""
        connection = await self._connect()
        try:
            yield connection
        finally:
            connection.close()

    async def run(self, container: str, config: Mapping[str, Any]) -> ExecStream:
        """Run a program in a container; `config` is the body of the engine's `exec` request. Raises EngineRefused."""
        connection = await self._connect()
        try:
            async with asyncio.timeout(ANSWER_S):
                made = await connection.ask(f"/containers/{container}/exec", config)
                tty = bool(config.get("Tty"))
                start = {"Detach": False, "Tty": tty}
                await connection.send(f"/exec/{made['Id']}/start", json.dumps(start).encode(), upgrade=True)
                await connection.answer()
        except TimeoutError:
            connection.close()
            raise SandboxError(f"the docker engine did not start a program within {ANSWER_S:.0f} s") from None
        except BaseException:
            connection.close()
            raise
        return ExecStream(connection, tty=tty)

    async def _connect(self) -> Connection:
        connection = Connection(*await self._address.connect(), self._version)
        self._open.add(connection)
        return connection


class Connection:
    """HTTP/1.1 as far as the engine speaks it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: str) -> None:
        self.reader = reader
        self.writer = writer
        self._version = version
        self._chunked = False
        self._left = 0

    def close(self) -> None:
        """Close it; never raises."""
        with suppress(OSError, RuntimeError):
            self.writer.close()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON, and the JSON of the answer. Raises EngineRefused, SandboxError."""
        await self.send(path, json.dumps(body).encode())
        await self.answer()
        return json.loads(b"".join([piece async for piece in self.pieces()]))

    async def send(self, path: str, body: bytes, *, kind: str = "application/json", upgrade: bool = False) -> None:
        """POST `body`."""
        upgrading = "Connection: Upgrade\r\nUpgrade: tcp\r\n" if upgrade else ""
        head = (
            f"POST /v{self._version}{path} HTTP/1.1\r\nHost: docker\r\n{upgrading}"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            self.writer.write(head.encode() + body)
            await self.writer.drain()
        except OSError as error:
            raise SandboxError(f"the docker engine closed the connection: {error}") from error

    async def answer(self) -> int:
        """Read the head of the answer; returns the status. Raises EngineRefused for one that is an error."""
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise SandboxError(f"the docker engine gave no answer: {error}") from error
        status = int(head[0].split(" ", 2)[1])
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self._left = int(fields.get("content-length", 0))
        if status >= 400:
            text = b"".join([piece async for piece in self.pieces()]).decode(errors="replace").strip()
            with suppress(ValueError, TypeError, KeyError):
                text = json.loads(text)["message"]
            raise EngineRefused(status, text)
        return status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of the answer. Raises SandboxError when it breaks off."""
        try:
            if not self._chunked:
                while self._left and (piece := await self.reader.read(min(self._left, _READ_BYTES))):
                    self._left -= len(piece)
                    yield piece
                return
            while size := int((await self.reader.readline()).split(b";")[0] or b"0", 16):
                yield await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
        except (asyncio.IncompleteReadError, ValueError, OSError) as error:
            raise SandboxError(f"the docker engine broke its answer off: {error}") from error


class ExecStream:
    """A `Stream` over an upgraded connection. Without a terminal the engine marks each piece as stdout or stderr."""

    def __init__(self, connection: Connection, *, tty: bool) -> None:
        self._connection = connection
        self._tty = tty
        self._name: StreamName = "stdout"
        self._left = 0

    async def write(self, data: bytes) -> None:
        """To the program's standard input."""
        try:
            self._connection.writer.write(data)
            await self._connection.writer.drain()
        except (OSError, RuntimeError) as error:
            raise SandboxError(f"the program in the sandbox is gone: {error}") from error

    async def read(self) -> tuple[StreamName, bytes] | None:
        """The next piece. A cancelled read loses nothing."""
        reader = self._connection.reader
        try:
            if self._tty:
                data = await reader.read(_READ_BYTES)
                return ("stdout", data) if data else None
            while not self._left:
                head = await reader.readexactly(_FRAME_HEAD_BYTES)
                self._name = "stderr" if head[0] == 2 else "stdout"
                self._left = int.from_bytes(head[4:], "big")
            data = await reader.read(min(self._left, _READ_BYTES))
        except (asyncio.IncompleteReadError, OSError):
            return None
        self._left -= len(data)
        return (self._name, data) if data else None

    async def close(self) -> None:
        """Close the connection; the program's input ends, it lives on."""
        self._connection.close()
