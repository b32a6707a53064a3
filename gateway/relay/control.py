"""The relay's control socket: one request a connection, a line of JSON each way, a listening socket along with it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import structlog
from msgspec import Meta, Struct

from rollyard.gateway.relay.folder import RelayFolder
from rollyard.schemas.errors import RollyardError, SandboxError

log = structlog.get_logger(__name__)

MAX_LINE_BYTES: Final = 4 << 20
REQUEST_TIMEOUT_S: Final = 30.0
ASK_TIMEOUT_S: Final = 30.0


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked of a relay.

    `hello`: who are you; `open`: accept connections at the socket that comes along, for the sandbox `key`, whose
    network lives with the process `holder`; `close`: no longer; `missing`: which of `keys` have no door.
    """

    do: Literal["hello", "open", "close", "missing"]
    key: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")] = "-"
    holder: int = 0
    netns: int = 0  # number of the network namespace
    keys: tuple[str, ...] = ()


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the relay says. `incarnation` differs between two starts of a relay."""

    incarnation: str = ""
    error: str = ""
    missing: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()  # URLs
    refused: tuple[str, ...] = ()  # why gateways cannot be used
    doors: int = 0
    connections: int = 0  # open now
    carried: int = 0  # since the start
    turned_away: int = 0  # since the start, for want of a gateway


Answerer = Callable[[Request, socket.socket | None], Awaitable[Answer]]


def ask(folder: Path, request: Request, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
    """Ask the relay of a folder; blocks. Raises SandboxError that says how to come to a relay."""
    try:
        with RelayFolder(folder).connect(timeout_s) as sock:
            sock.sendall(msgspec.json.encode(request) + b"\n")
            line = sock.makefile("rb").readline()
        answer = msgspec.json.decode(line, type=Answer)
    except PermissionError as error:
        raise SandboxError(
            f"the relay at {folder} belongs to another user", hint="start relay and workers as the same user"
        ) from error
    except (OSError, msgspec.MsgspecError) as error:
        why = "no answer" if isinstance(error, msgspec.MsgspecError) else error.strerror or str(error)
        raise no_relay(folder, why) from error
    if answer.error:
        raise SandboxError(answer.error)
    return answer


def no_relay(folder: Path, why: str) -> SandboxError:
    """The error when there is none."""
    return SandboxError(
        f"no relay answers at {folder} ({why}), so sandboxes reach no gateway",
        hint="start `rollyard relay` on this machine; `rollyard up` does it by itself",
    )


class ControlServer:
    """Answers at a listening socket. Not asyncio's own server: that has no way to receive descriptors."""

    def __init__(self, listener: socket.socket, answer: Answerer) -> None:
        self._listener = listener
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ControlServer:
        self._loop.add_reader(self._listener.fileno(), self._accept)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._loop.remove_reader(self._listener.fileno())
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._serve(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        descriptors: list[int] = []
        line = b""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await self._line(sock, descriptors)
                passed = socket.socket(fileno=descriptors.pop(0)) if descriptors else None
                answer = await self._answered(line, passed)
                await self._loop.sock_sendall(sock, msgspec.json.encode(answer) + b"\n")
        except (OSError, TimeoutError) as error:
            if line:  # who only connects may be gone before the answer
                log.debug("control_broken", error=repr(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            sock.close()

    async def _line(self, sock: socket.socket, descriptors: list[int]) -> bytes:
        """What comes up to the end of the line, or of the connection."""
        parts = bytearray()
        while not parts.endswith(b"\n") and len(parts) <= MAX_LINE_BYTES:
            try:
                data, passed, _, _ = socket.recv_fds(sock, 65_536, 4)
            except BlockingIOError:
                await self._readable(sock)
                continue
            descriptors += passed
            if not data:
                break
            parts += data
        return bytes(parts)

    async def _readable(self, sock: socket.socket) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(sock.fileno())

    async def _answered(self, line: bytes, passed: socket.socket | None) -> Answer:
        try:
            # Who only connects wants to know whether somebody is here.
            request = msgspec.json.decode(line, type=Request) if line else Request(do="hello")
            answer = await self._answer(request, passed)
        except msgspec.MsgspecError as error:
            answer = Answer(error=f"the relay was not asked properly: {error}")
        except RollyardError as error:
            answer = Answer(error=str(error))
        except BaseException:
            _close(passed)
            raise
        if answer.error:
            _close(passed)
        return answer


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
