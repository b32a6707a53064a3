"""A pipe to a program of this machine: two pipes of the kernel. Also for programs that enter a jail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Final, Self

from rollyard.schemas.errors import SandboxError
from rollyard.stages.pipes.descendants import family
from rollyard.stages.pipes.fds import FdPipe

Kill = Callable[[], Awaitable[None]]
REAP_S: Final = 0.002
MAX_REAP_S: Final = 0.1
REAP_LOOKS: Final = 100


class ChildPipe(FdPipe):
    """A program that this process started in a session of its own.

    `argv` is what runs in the sandbox: the last part of the child's own command line, which may enter a jail first.
    `kill` ends what the program left behind and its process group does not hold.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], fds: tuple[int, int], argv: Sequence[str], kill: Kill | None
    ) -> None:
        super().__init__(*fds)
        self._child = child
        self._argv = tuple(argv)
        self._kill = kill

    async def interrupt(self) -> None:
        """SIGINT to `argv`, wherever below the child it is, and to what it runs in its process group."""
        for pid in family(self._child.pid, self._argv):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGINT)

    async def close(self) -> None:
        """Kill the child's process group, then whatever `kill` kills."""
        if not self._open:
            return
        await super().close()
        # A group outlives its leader, whose number is not given anew while the group has it.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        if self._kill is not None:
            await self._kill()
        await self._reap()

    async def _reap(self) -> None:
        pause_s = REAP_S
        for _ in range(REAP_LOOKS):
            if self._child.poll() is not None:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_REAP_S)


class SubprocessPipe(ChildPipe):
    """Standard input, and standard output with standard error, of a child."""

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        inner: Sequence[str] = (),
        cwd: str | None = None,
        env: Mapping[str, str],
        kill: Kill | None = None,
    ) -> Self:
        """Start `argv`. `inner` is the part of it that runs in the sandbox; empty: all of it. Raises SandboxError."""
        child = spawn(argv, cwd, env, subprocess.PIPE)
        return cls(child, (detached(child.stdout), detached(child.stdin)), inner or argv, kill)


def spawn(argv: Sequence[str], cwd: str | None, env: Mapping[str, str], stdio: int) -> subprocess.Popen[bytes]:
    """A child in a session of its own, its streams at `stdio`. Raises SandboxError.

    It is started on the thread of the event loop: a child that asks to die with its parent dies with that thread.
    """
    output = subprocess.STDOUT if stdio == subprocess.PIPE else stdio
    try:
        return subprocess.Popen(
            argv, bufsize=0, stdin=stdio, stdout=stdio, stderr=output, cwd=cwd, env=dict(env), start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise SandboxError(f"a shell cannot be started in the sandbox: {error}", hint="is it still there?") from error


def detached(file: IO[bytes] | None) -> int:
    """A descriptor of an open file that nobody else closes."""
    assert file is not None
    fd = os.dup(file.fileno())
    file.close()
    return fd
