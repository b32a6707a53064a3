"""A program in an instance, run by `apptainer exec` in a session of its own, and its streams."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.apptainer_command import exec_argv
from rollyard.stages.sandboxes.inside_channel import Stream, StreamName
from rollyard.stages.sandboxes.shim import Children

_READ_BYTES: Final = 1 << 16
_QUEUE: Final = 64


class ApptainerEntrance:
    """Runs programs in one instance."""

    binary = True

    def __init__(self, program: str, name: str, children: Children) -> None:
        self._program = program
        self._name = name
        self._children = children

    async def open(self, argv: Sequence[str], *, user: str, tty: bool = False) -> Stream:
        """Run a program as the one user there is. Raises SandboxError."""
        if user:
            raise SandboxError(f"instances of apptainer have no user {user!r}", hint="leave the user out")
        if tty:
            raise SandboxError("instances of apptainer give no terminal", hint="open the shell without tty")
        return await ProcessStream.spawn(exec_argv(self._program, self._name, argv), self._children)


class ProcessStream:
    """A program of this machine as a `Stream`. Letting go of it does not end it."""

    def __init__(self, transports: Sequence[asyncio.BaseTransport], stdin: asyncio.StreamWriter) -> None:
        self._transports = transports
        self._stdin = stdin
        self._output: asyncio.Queue[tuple[StreamName, bytes] | None] = asyncio.Queue(_QUEUE)
        self._ended = False
        self._pumps: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, argv: Sequence[str], children: Children) -> ProcessStream:
        """Start it in a session of its own, so that no signal of the worker's reaches it. Raises SandboxError."""
        pid, in_write, out_read, err_read = _spawned(argv)
        children.adopt(pid)
        stdout, stdout_transport = await _reader(out_read)
        stderr, stderr_transport = await _reader(err_read)
        loop = asyncio.get_running_loop()
        pipe = open(in_write, "wb", buffering=0)  # noqa: PTH123, SIM115 - the transport closes it
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        stream = cls((stdout_transport, stderr_transport, transport), writer)
        stream._pumps = asyncio.create_task(stream._pump_both(stdout, stderr))
        return stream

    async def write(self, data: bytes) -> None:
        """To its standard input. Raises SandboxError when nobody reads it."""
        try:
            if self._stdin.is_closing():
                raise BrokenPipeError("its input is closed")
            self._stdin.write(data)
            await self._stdin.drain()
        except OSError as error:
            raise SandboxError(f"a program in the sandbox takes no input: {error}") from error

    async def read(self) -> tuple[StreamName, bytes] | None:
        """What it wrote next; None at its end."""
        if self._ended:
            return None
        got = await self._output.get()
        self._ended = got is None
        return got

    async def close(self) -> None:
        """End its input and its output; it may live on."""
        if self._pumps is not None:
            self._pumps.cancel()
            with suppress(asyncio.CancelledError):
                await self._pumps
        for transport in self._transports:
            transport.close()
        while self._output.full():
            self._output.get_nowait()
        self._output.put_nowait(None)

    async def _pump_both(self, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(stdout, "stdout"))
            group.create_task(self._pump(stderr, "stderr"))
        await self._output.put(None)

    async def _pump(self, reader: asyncio.StreamReader, name: StreamName) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                await self._output.put((name, data))


def _spawned(argv: Sequence[str]) -> tuple[int, int, int, int]:
    """A new process: its pid, and our ends of its input and outputs."""
    (in_read, in_write), (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe(), os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((in_read, out_write, err_write))]
    try:
        pid = os.posix_spawnp(argv[0], list(argv), os.environ, file_actions=actions, setsid=True)
    except (OSError, ValueError) as error:
        for fd in (in_write, out_read, err_read):
            os.close(fd)
        raise SandboxError(f"{argv[0]} cannot be run: {error}", hint="is apptainer installed?") from error
    finally:
        for fd in (in_read, out_write, err_write):
            os.close(fd)
    return pid, in_write, out_read, err_read


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = open(fd, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport
