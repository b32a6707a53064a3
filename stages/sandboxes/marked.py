"""Killing by mark: processes of a local sandbox are found by a variable in their environment, wherever they went.

A process that left its group and its parent still carries the environment it was started with. Only Linux shows it
(/proc); elsewhere nothing is found.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError

VARIABLE: Final = "ROLLYARD_PROCESS"
ROUNDS: Final = 20
PAUSE: Final = 3.0

_NEEDLE: Final = VARIABLE.encode() + b"="
_CHUNK_BYTES: Final = 65_536
_EXEC_LOOKS: Final = 100
_EXEC_PAUSE_S: Final = 0.001
_PF_EXITING: Final = 0x4
_PF_KTHREAD: Final = 0x0020_0000


class MarkedProcesses:
    """Kills processes by mark. One look over /proc serves all who ask meanwhile.

    A look costs about 10 us a process of the machine, so after each one follows a pause of three times its length.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[str, asyncio.Future[int]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def kill(self, mark: str) -> None:
        """Kill until none is left. `mark` is `SANDBOX.NAME.`, or `SANDBOX.` for all of a sandbox.

        Raises SandboxError when new ones come faster than they can be killed.
        """
        for _ in range(ROUNDS):
            if not await self._next_look(mark):
                return
        raise SandboxError(
            f"processes marked {mark!r} start new ones faster than they can be killed",
            hint=f"look for {VARIABLE}={mark} in /proc/*/environ",
        )

    def _next_look(self, mark: str) -> asyncio.Future[int]:
        """How many the next look killed."""
        killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.append((mark, killed))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_asked())
        return killed

    async def _look_while_asked(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            began = time.monotonic()
            killed = await asyncio.to_thread(kill_marked, {mark for mark, _ in asked})
            for mark, future in asked:
                if not future.done():
                    future.set_result(killed[mark])
            await asyncio.sleep((time.monotonic() - began) * PAUSE)


def kill_marked(marks: Collection[str]) -> dict[str, int]:
    """Look once at every process and kill those that carry one of `marks`; returns how many, by mark."""
    wanted = {mark.encode(): mark for mark in marks}
    killed = dict.fromkeys(marks, 0)
    seen: set[str] = set()
    # A process may start another one and end between the listing and the look at it: list until nothing is new.
    while new := _processes() - seen:
        seen |= new
        for entry in new:
            value = _mark_of(entry)
            whole = value.partition(b".")[0] + b"."
            found = [wanted[mark] for mark in {value, whole} if mark in wanted]
            if found:
                with suppress(ProcessLookupError):
                    os.kill(int(entry), signal.SIGKILL)
            for mark in found:
                killed[mark] += 1
    return killed


def _processes() -> set[str]:
    """Process ids as /proc lists them; none where there is no /proc."""
    with suppress(FileNotFoundError):
        return {entry for entry in os.listdir("/proc") if entry.isdigit()}  # noqa: PTH208 - Path objects cost thrice
    return set()


def _mark_of(pid: str) -> bytes:
    """The mark that a process carries; empty when it has none, is a zombie, or belongs to somebody else."""
    with suppress(OSError):
        environment = _environment(pid)
        for _ in range(_EXEC_LOOKS):
            if environment:
                break
            # Asked before the environment is read again: `execve` may end between the two.
            executing = _executing(pid)
            environment = _environment(pid)
            if not executing:
                break
            time.sleep(_EXEC_PAUSE_S)
        before, found, after = environment.partition(_NEEDLE)
        if found and before[-1:] in (b"", b"\0"):
            return after.partition(b"\0")[0]
    return b""


def _environment(pid: str) -> bytes:
    file = os.open(f"/proc/{pid}/environ", os.O_RDONLY)
    try:
        environment = chunk = os.read(file, _CHUNK_BYTES)
        while len(chunk) == _CHUNK_BYTES:
            environment += (chunk := os.read(file, _CHUNK_BYTES))
        return environment
    finally:
        os.close(file)


def _executing(pid: str) -> bool:
    """Whether a process is in the middle of `execve`, when it has no environment yet. See proc(5), stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    state, flags, env_end = fields[0], int(fields[6]), fields[48]
    return state not in "ZX" and not flags & (_PF_KTHREAD | _PF_EXITING) and env_end == "0"
