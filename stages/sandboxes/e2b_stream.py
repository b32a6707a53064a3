"""How a program is run in a sandbox of E2B, and its streams."""

from __future__ import annotations

import asyncio
import codecs
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from e2b import AsyncSandbox
from e2b.exceptions import NotFoundException
from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.e2b_errors import converted
from rollyard.stages.sandboxes.inside_channel import Stream, StreamName

CHUNK_BYTES: Final = 1 << 18
IDLE_S: Final = 60.0
HEALTH_TRIES: Final = 3
HEALTH_PAUSE_S: Final = 5.0
BINARY: Final = {"_stdout_decoder", "_stderr_decoder"} <= set(AsyncCommandHandle.__init__.__code__.co_names)
"""The SDK decodes output as UTF-8, which loses other bytes. Its decoders can be replaced by those of Latin-1, which
lose none, if it still has them; else inside.sh encodes what it sends."""

_ENCODING: Final = "latin-1" if BINARY else "utf-8"
_QUEUE: Final = 64
# E2B's daemon keeps all commands in its own session.
_OWN_SESSION: Final = 'command -v setsid >/dev/null && set -- setsid; exec "$@" '


class E2bEntrance:
    """Runs programs through E2B's daemon. `connected` gives the sandbox, and raises SandboxError."""

    binary = BINARY

    def __init__(self, connected: Callable[[], Awaitable[AsyncSandbox]], label: str) -> None:
        self._connected = connected
        self._label = label

    async def open(self, argv: Sequence[str], *, user: str, tty: bool = False) -> Stream:
        """Run a program. It has no time limit of its own. Raises SandboxError."""
        if tty:
            raise SandboxError("sandboxes of E2B give no terminal", hint="open the shell without tty")
        sandbox = await self._connected()
        stream = E2bStream(sandbox, self._label)
        command, whose = _OWN_SESSION + shlex.join(argv), user or None
        if user.isdecimal():
            # E2B knows users by name only.
            become = f"exec setpriv --reuid={user} --regid={user} --clear-groups"
            command, whose = f"{become} sh -c {shlex.quote(command)}", "root"
        with converted(f"a program in {self._label} could not be started"):
            handle = await sandbox.commands.run(
                command,
                background=True,
                stdin=True,
                user=whose,
                cwd="/",
                timeout=0,
                on_stdout=stream.on_stdout,
                on_stderr=stream.on_stderr,
                retain_output=False,
            )
        stream.follow(handle)
        return stream

    async def attach(self, pid: int) -> Stream | None:
        """The streams, from now on, of a program that runs already; None: it does not. Raises SandboxError."""
        sandbox = await self._connected()
        stream = E2bStream(sandbox, self._label)
        with converted(f"a program in {self._label} could not be attached to"):
            try:
                handle = await sandbox.commands.connect(
                    pid, timeout=0, on_stdout=stream.on_stdout, on_stderr=stream.on_stderr, retain_output=False
                )
            except NotFoundException:
                return None
        stream.follow(handle)
        return stream


class E2bStream:
    """One program. Its output waits here, and then in the sandbox, until somebody reads it."""

    def __init__(self, sandbox: AsyncSandbox, label: str) -> None:
        self._sandbox = sandbox
        self._label = label
        self._output: asyncio.Queue[tuple[StreamName, bytes] | None] = asyncio.Queue(_QUEUE)
        self._handle: AsyncCommandHandle[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._ended = False

    def follow(self, handle: AsyncCommandHandle[None]) -> None:
        """Take notice of its output and its end. To be called before the event loop goes on."""
        if BINARY:
            decoder: Any = codecs.getincrementaldecoder(_ENCODING)
            handle._stdout_decoder, handle._stderr_decoder = decoder(), decoder()
        self._handle = handle
        self._end = asyncio.create_task(self._wait(handle))

    async def on_stdout(self, text: str) -> None:
        """The SDK's callback."""
        await self._output.put(("stdout", text.encode(_ENCODING)))

    async def on_stderr(self, text: str) -> None:
        """The SDK's callback."""
        await self._output.put(("stderr", text.encode(_ENCODING)))

    async def write(self, data: bytes) -> None:
        """To its standard input, in order. Raises SandboxError."""
        handle = self._handle
        if handle is None:
            raise SandboxError(f"a program in {self._label} has ended")
        with converted(f"a program in {self._label} takes no input"):
            for start in range(0, len(data), CHUNK_BYTES):
                await handle.send_stdin(data[start : start + CHUNK_BYTES])

    async def read(self) -> tuple[StreamName, bytes] | None:
        """What it wrote next; None at its end, or when the connection broke."""
        while not self._ended:
            try:
                async with asyncio.timeout(IDLE_S):
                    got = await self._output.get()
            except TimeoutError:
                # A connection may die without a word. Its end would then be waited for in vain.
                self._ended = not await self._sandbox_lives()
                continue
            self._ended = got is None
            return got
        return None

    async def _sandbox_lives(self) -> bool:
        """False only if E2B says so, or says nothing several times in a row."""
        for _ in range(HEALTH_TRIES):
            with suppress(SandboxError), converted("asking"):
                return await self._sandbox.is_running()
            await asyncio.sleep(HEALTH_PAUSE_S)
        return False

    async def close(self) -> None:
        """Close its input and stop listening."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with suppress(SandboxError), converted("closing"):
            await handle.close_stdin()
        if self._end is not None:
            self._end.cancel()
        with suppress(SandboxError), converted("closing"):
            await handle.disconnect()
        # Whoever still waits in `read` gets the end.
        while self._output.full():
            self._output.get_nowait()
        self._output.put_nowait(None)

    async def _wait(self, handle: AsyncCommandHandle[None]) -> None:
        # How it ended is told in its output by inside.sh; here only that it did.
        with suppress(SandboxError), converted("waiting"):
            await handle.wait()
        await self._output.put(None)
