"""A persistent shell in a sandbox: one working directory and environment, many commands, one after another.

The fast way for an agent loop that stands outside: a command costs a round trip through pipes, not a new process of the
sandbox's runtime. `PipeShell` is that shell over any `Pipe`; backends bring the pipe (stages/pipes/).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from rollyard.schemas.errors import SandboxError
from rollyard.stages.shell_frames import CommandEnd, Frames, ShellEnd, Tail
from rollyard.stages.shell_script import argv_of, command_text, first_text, restoring_text
from rollyard.stages.shell_state import ShellState

MAX_SHELL_OUTPUT_BYTES: Final = 1 << 20
START_TIMEOUT_S: Final = 30.0
INTERRUPT_GRACE_S: Final = 0.5
PIPE_BYTES: Final = 32_768
"""A command up to this long goes into an empty pipe at once; a longer one is written while output is read."""


@dataclass(frozen=True, slots=True)
class ShellResult:
    """What one command left. `output` is standard output and standard error as they came, its last `max_output_bytes`.

    `exit_code` is the shell's `$?` (128 + n for a program that signal n killed); None when the command was ended at its
    time limit, or ended the shell in a way that tells none. `restarted`: it ended the shell, or the shell had ended
    before it began. The next command runs in a new one, in the directory and with the exported variables that the old
    one last told; functions, aliases, other variables, options and background jobs are gone.
    """

    exit_code: int | None
    output: bytes
    timed_out: bool = False
    truncated: bool = False
    restarted: bool = False


class Pipe(Protocol):
    """Both ends of one running program in a sandbox. Backends make them for `PipeShell`."""

    async def write(self, data: bytes) -> None:
        """All of it to its standard input, also while a `read` waits. Raises SandboxError when nobody reads it."""
        ...

    async def read(self) -> bytes:
        """What it has written since, to standard output and standard error together: at least one byte, at most about
        a MiB; empty at its end. A cancelled read loses nothing."""
        ...

    async def interrupt(self) -> None:
        """Send SIGINT to the program's process group, as Ctrl-C does. The shell lives on, what it runs ends."""
        ...

    async def close(self) -> None:
        """Kill it and everything that it started. Does nothing the second time."""
        ...


Opener = Callable[[tuple[str, ...]], Awaitable[Pipe]]
"""Starts a program in the sandbox, in a session of its own, in the shell's first working directory and environment:
argv -> pipe. Raises SandboxError."""


class Shell(Protocol):
    """A persistent shell: `bash` where the sandbox has one, else `sh`. An async context manager; not for two callers
    at a time. Commands read /dev/null."""

    async def run(
        self, command: str, *, timeout_s: float, max_output_bytes: int = MAX_SHELL_OUTPUT_BYTES
    ) -> ShellResult:
        """Run one command, of one or many lines. Raises SandboxError when the sandbox is gone."""
        ...

    async def close(self) -> None:
        """End the shell and everything that it started."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PipeShell:
    """The `Shell` of every backend. Make it with `opened`.

    The shell reads our text from its standard input. Each command is one `eval` of a quoted string, so that nothing in
    it can swallow what follows: a line that prints a frame with a nonce that the command cannot know, the exit code,
    and, after that, the working directory and the exported variables. The caller goes on as soon as it has the exit
    code; directory and variables are read before the output of the next command.
    """

    def __init__(self, open_pipe: Opener) -> None:
        self._open_pipe = open_pipe
        self._pipe: Pipe | None = None
        self._frames = Frames(b"")
        self._channel = 9
        self._first = ShellState()
        self._known = ShellState()
        self._last_code = 0
        self._closed = False
        # True while a command is under way: who finds it so was cancelled, and the shell is in no known state.
        self._busy = False

    @classmethod
    async def opened(cls, open_pipe: Opener) -> Self:
        """Start it. Raises SandboxError when the sandbox is gone, or has no shell."""
        shell = cls(open_pipe)
        await shell._start()
        shell._first = shell._known
        return shell

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the shell and everything that it started."""
        self._closed = True
        await self._discard()

    async def run(
        self, command: str, *, timeout_s: float, max_output_bytes: int = MAX_SHELL_OUTPUT_BYTES
    ) -> ShellResult:
        """Run one command. Raises SandboxError when the sandbox is gone, or the command holds a NUL."""
        if "\0" in command:
            raise SandboxError("the command holds a NUL, which no shell can take", hint="write such bytes with printf")
        if self._closed:
            raise SandboxError("the shell is closed", hint="open another one")
        if self._busy:
            await self._discard()
        nonce = secrets.token_hex(8).encode()
        text = command_text(command, nonce, self._channel, self._last_code)
        output = Tail(max_output_bytes)
        for last_try in (False, True):
            pipe = self._pipe or await self._restart()
            self._busy = True
            if len(text) > PIPE_BYTES:
                return await self._run_long(pipe, text, nonce, output, timeout_s)
            try:
                await pipe.write(text)
            except SandboxError:
                # The shell ended while nobody looked, so the command has not begun.
                await self._discard()
                if last_try:
                    raise
                continue
            return await self._result(pipe, nonce, output, timeout_s)
        raise AssertionError("unreachable")

    async def _run_long(self, pipe: Pipe, text: bytes, nonce: bytes, output: Tail, timeout_s: float) -> ShellResult:
        """Write while reading, since a shell that cannot write its output reads nothing."""
        writing = asyncio.ensure_future(pipe.write(text))
        try:
            return await self._result(pipe, nonce, output, timeout_s, writing)
        finally:
            writing.cancel()
            with suppress(asyncio.CancelledError, SandboxError):
                await writing

    async def _result(
        self,
        pipe: Pipe,
        nonce: bytes,
        output: Tail,
        timeout_s: float,
        writing: asyncio.Future[None] | None = None,
    ) -> ShellResult:
        timed_out = False
        end: CommandEnd | ShellEnd | None
        try:
            async with asyncio.timeout(timeout_s):
                end = await self._end(pipe, nonce, output)
        except TimeoutError:
            timed_out = True
            end = await self._interrupted(pipe, nonce, output) if writing is None or writing.done() else None
        if isinstance(end, CommandEnd):
            self._last_code = end.code
            self._busy = False
        else:
            self._frames.drain(output)
            await self._discard()
        return ShellResult(
            exit_code=None if timed_out or end is None else end.code,
            output=output.bytes(),
            timed_out=timed_out,
            truncated=output.truncated,
            restarted=not isinstance(end, CommandEnd),
        )

    async def _interrupted(self, pipe: Pipe, nonce: bytes, output: Tail) -> CommandEnd | ShellEnd | None:
        await pipe.interrupt()
        try:
            async with asyncio.timeout(INTERRUPT_GRACE_S):
                return await self._end(pipe, nonce, output)
        except TimeoutError:
            return None

    async def _end(self, pipe: Pipe, nonce: bytes, output: Tail) -> CommandEnd | ShellEnd:
        """Read until the end of the command, or of the shell."""
        end = self._frames.feed(b"", nonce, output)
        while end is None:
            if not (data := await pipe.read()):
                return ShellEnd(None)
            end = self._frames.feed(data, nonce, output)
        return end

    async def _discard(self) -> None:
        """Kill the shell, and keep what it told of itself."""
        self._known = self._frames.state or self._known
        self._busy = False
        self._last_code = 0
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            await asyncio.shield(pipe.close())

    async def _restart(self) -> Pipe:
        known = self._known
        return await self._start(restoring_text(self._first, known))

    async def _start(self, more: bytes = b"") -> Pipe:
        prefix, nonce = secrets.token_hex(8), secrets.token_hex(8).encode()
        self._pipe = pipe = await self._open_pipe(argv_of(prefix))
        self._frames = Frames(prefix.encode())
        self._busy = True
        output = Tail(4096)
        end: CommandEnd | ShellEnd = ShellEnd(None)
        with suppress(TimeoutError, SandboxError):
            async with asyncio.timeout(START_TIMEOUT_S):
                with suppress(SandboxError):  # it may have said why it ended
                    await pipe.write(first_text(prefix, nonce, more))
                end = await self._end(pipe, nonce, output)
                # What it tells of itself comes after that.
                while self._frames.feed(b"", nonce, output) is None and self._frames.state is None:
                    if not (data := await pipe.read()):
                        break
                    self._frames.feed(data, nonce, output)
        if isinstance(end, ShellEnd) or self._frames.state is None:
            self._frames.drain(output)
            await self._discard()
            said = output.bytes().decode(errors="replace").strip()
            raise SandboxError(f"no shell can be started in the sandbox: {said or 'it said nothing'}")
        self._channel = end.code
        self._known = self._frames.state
        self._busy = False
        return pipe
