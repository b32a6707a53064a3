"""Processes of a sandbox on this machine, each behind a shim of its own: what `local` and `bubblewrap` share.

A backend says how a command becomes a program of this machine (`Wrap`); starting it once, finding it again, its end,
its output and its death are the same for both. See shim.sh for what stands in a control folder.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import ExecResult, ProcessEnd
from rollyard.stages.sandboxes.census import VARIABLE
from rollyard.stages.sandboxes.files import tail
from rollyard.stages.sandboxes.folder import CONTROL, nonce_of
from rollyard.stages.sandboxes.marked import MarkedProcesses
from rollyard.stages.sandboxes.shim import Children, Launch, Shim, ShimSettings

MIN_POLL_S: Final = 0.02
MAX_POLL_S: Final = 0.25
EXEC: Final = "exec-"

_PROCESS: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# A shell stands between us and the agent, and sets these itself.
SHELL_VARIABLES: Final = frozenset({"IFS", "OLDPWD", "OPTIND", "PPID", "PWD", "SHLVL", "_", VARIABLE})


@dataclass(frozen=True, slots=True)
class Host:
    """What all sandboxes of one backend in this process share."""

    shims: ShimSettings
    children: Children = field(default_factory=Children)
    marked: MarkedProcesses = field(default_factory=MarkedProcesses)


class Wrap(Protocol):
    """How a backend turns a command into a program of this machine."""

    def __call__(self, command: Command, cwd: str | None, mark: str) -> Launch:
        """`cwd` is relative to the working directory, or absolute, or None. Raises SandboxError."""
        ...


class ShimmedProcesses:
    """The processes of one sandbox, in its folder's `control`."""

    def __init__(self, host: Host, folder: Path, wrap: Wrap) -> None:
        self._host = host
        self._folder = folder
        self._nonce = nonce_of(folder)
        self._wrap = wrap
        self._ended: dict[str, asyncio.Event] = {}

    async def start(self, name: str, command: Command, *, deadline_s: float, cwd: str | None = None) -> bool:
        """Start `command` behind a shim of its own session; False: `name` was started before. Raises SandboxError."""
        shim = self.shim(name)
        if shim.started():
            return False
        return await self._launch(shim, self._wrap(command, cwd, shim.mark), deadline_s)

    async def _launch(self, shim: Shim, launch: Launch, deadline_s: float) -> bool:
        # Shielded, so that a shim which was spawned is always adopted.
        token, ended = await asyncio.shield(self._spawn(shim, launch, deadline_s))
        pause_s = 0.001
        while not shim.claimed_by() and not ended.is_set():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        if shim.claimed_by() == token:
            self._ended[shim.folder.name] = ended
            return True
        if not self._folder.exists():
            raise SandboxError(f"the sandbox {self._folder} is gone", hint="a new attempt makes another")
        return False

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the shim's word; when the shim is dead without one, kill what it left and say `lost`."""
        shim = self.shim(name)
        ended = self._ended.get(name)
        pause_s = MIN_POLL_S
        while (end := shim.end()) is None and shim.alive():
            if ended is not None and not ended.is_set():
                await ended.wait()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
        end = end or shim.end()  # it may have been written just before the shim ended
        if end is None:
            shim.ask_killed()
            shim.kill_group(self._host.shims.boot_id)
        await self._host.marked.kill(shim.mark)
        self._ended.pop(name, None)
        return end or ProcessEnd(None, "lost")

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The end of each stream; empty for a process that was never started."""
        folder = self.shim(name).folder
        return tail(folder / "stdout", max_bytes), tail(folder / "stderr", max_bytes)

    async def kill(self, name: str) -> None:
        """Kill the process; its shim then writes `killed`."""
        shim = self.shim(name)
        if not shim.started():
            return
        if shim.end() is None:
            shim.ask_killed()
            await self._end(shim)
        await self._host.marked.kill(shim.mark)

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None,
        timeout_s: float,
        max_output_bytes: int,
    ) -> ExecResult:
        """Run a command through a shim of its own, wait for it, and forget it. Raises SandboxError."""
        name = f"{EXEC}{secrets.token_hex(8)}"
        try:
            await self.start(name, command, deadline_s=timeout_s, cwd=cwd)
            end = await self.wait(name)
            stdout, stderr = await self.output(name, max_output_bytes + 1)
        except asyncio.CancelledError:
            await asyncio.shield(self.kill(name))
            raise
        shutil.rmtree(self.shim(name).folder, ignore_errors=True)
        if end.reason == "memory":
            raise SandboxError("a command went over the sandbox's memory limit", hint="see sandbox.limits.memory_bytes")
        if end.reason not in ("exited", "deadline"):
            raise SandboxError(f"a command in the sandbox {self._folder.name} did not end by itself: {end.reason}")
        return ExecResult(
            exit_code=end.exit_code,
            stdout=_last(stdout, max_output_bytes),
            stderr=_last(stderr, max_output_bytes),
            timed_out=end.reason == "deadline",
            truncated=max(len(stdout), len(stderr)) > max_output_bytes,
        )

    async def end_all(self, gone: Path, namespace: int | None = None) -> None:
        """Kill whatever runs or is being started. `gone` is where the sandbox's folder is by now, `namespace` a user
        namespace that is all its own."""
        control = gone / CONTROL
        for folder in list(control.iterdir()) if control.exists() else []:
            shim = Shim(folder, self.mark(folder.name))
            if shim.started():
                await self._end(shim)
        await self._host.marked.kill(f"{self._nonce}.", namespace)

    def running(self) -> list[Shim]:
        """Those that were started and have not ended."""
        try:
            folders = list((self._folder / CONTROL).iterdir())
        except FileNotFoundError:
            return []
        shims = [Shim(folder, self.mark(folder.name)) for folder in folders]
        return [shim for shim in shims if shim.started() and shim.end() is None]

    def mark(self, name: str) -> str:
        """What the processes of `name` carry in their environment."""
        return f"{self._nonce}.{name}."

    def shim(self, name: str) -> Shim:
        """The process of that name. Raises SandboxError for what is no name."""
        if not _PROCESS.match(name):
            raise SandboxError(f"{name!r} names no process", hint="use lower-case letters, digits, '-' and '_'")
        return Shim(self._folder / CONTROL / name, self.mark(name))

    async def _spawn(self, shim: Shim, launch: Launch, deadline_s: float) -> tuple[str, asyncio.Event]:
        prepared = await asyncio.to_thread(shim.prepare, launch)
        pid = shim.spawn(launch, prepared, deadline_s, self._host.shims)
        return prepared.token, self._host.children.adopt(pid)

    async def _end(self, shim: Shim) -> None:
        """Kill the agent until its shim has seen it, or is dead itself."""
        pause_s = 0.001
        while shim.end() is None and shim.alive():
            shim.kill_group(self._host.shims.boot_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        if shim.end() is None:
            shim.kill_group(self._host.shims.boot_id)


def check_shell_variables(names: Mapping[str, str]) -> None:
    """Raises SandboxError for a variable that a shell between us and the agent would lose."""
    for name in names:
        if not _VARIABLE.match(name) or name in SHELL_VARIABLES or name.startswith("shim_"):
            raise SandboxError(
                f"the environment variable {name!r} cannot be set in a local sandbox",
                hint="names are letters, digits and '_', and none that the shell sets itself",
            )


def _last(data: bytes, max_bytes: int) -> bytes:
    return data[-max_bytes:] if max_bytes else b""
