"""A persistent shell in a sandbox: one working directory and environment, many commands, one after another.

The fast way for an agent loop that stands outside: a command costs a round trip through pipes, not a new process of the
sandbox's runtime.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class ShellResult:
    """What one command left. `output` is standard output and standard error as they came, its last `max_output_bytes`.

    `exit_code` is None when the command was ended at its time limit, or ended the shell in a way that tells none.
    `restarted`: the shell had to be started anew, in the same directory with the same environment as far as they are
    known; functions, aliases and background jobs are gone.
    """

    exit_code: int | None
    output: bytes
    timed_out: bool = False
    truncated: bool = False
    restarted: bool = False


class Pipe(Protocol):
    """Both ends of one running program in a sandbox. Backends make them for `Shell`."""

    async def write(self, data: bytes) -> None:
        """To its standard input. Raises SandboxError when it is gone."""
        ...

    async def read(self) -> bytes:
        """What it has written since, to standard output and standard error together; empty at its end."""
        ...

    async def interrupt(self) -> None:
        """Interrupt what the shell runs now, as Ctrl-C does, and leave the shell alone if possible."""
        ...

    async def close(self) -> None:
        """Kill it and everything that it started."""
        ...


Opener = Callable[[str | None, Mapping[str, str]], Awaitable[Pipe]]
"""Starts `bash`, else `sh`, in the sandbox without prompts: (working directory, environment) -> pipe."""


class Shell(Protocol):
    """A persistent shell. An async context manager; not for two callers at a time."""

    async def run(self, command: str, *, timeout_s: float, max_output_bytes: int = 1 << 20) -> ShellResult:
        """Run one command, of one or many lines. Raises SandboxError when the sandbox is gone."""
        ...

    async def close(self) -> None:
        """End the shell and everything that it started."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
