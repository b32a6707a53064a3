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
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.jail_kin import Families

VARIABLE: Final = "ROLLYARD_PROCESS"
ROUNDS: Final = 20
PAUSE: Final = 3.0

Target = tuple[str, int | None]
"""A mark, and a user namespace."""

_NEEDLE: Final = VARIABLE.encode() + b"="
_CHUNK_BYTES: Final = 8192
_EXEC_LOOKS: Final = 100
_EXEC_PAUSE_S: Final = 0.001
_PF_EXITING: Final = 0x4
_PF_KTHREAD: Final = 0x0020_0000


class MarkedProcesses:
    """Kills processes by mark. One look over /proc serves all who ask meanwhile.

    A look costs about 10 us a process of the machine, so after each one follows a pause of three times its length.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Target, asyncio.Future[int]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def kill(self, mark: str, namespace: int | None = None) -> None:
        """Kill until none is left. `mark` is `SANDBOX.NAME.`, or `SANDBOX.` for all of a sandbox; `namespace` is a user
        namespace right below our own, of which all are killed too.

        Raises SandboxError when new ones come faster than they can be killed.
        """
        for _ in range(ROUNDS):
            if not await self._next_look((mark, namespace)):
                return
        raise SandboxError(
            f"processes marked {mark!r} start new ones faster than they can be killed",
            hint=f"look for {VARIABLE}={mark} in /proc/*/environ",
        )

    def _next_look(self, target: Target) -> asyncio.Future[int]:
        """How many the next look killed."""
        killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.append((target, killed))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_asked())
        return killed

    async def _look_while_asked(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            began = time.monotonic()
            killed = await asyncio.to_thread(kill_once, {target for target, _ in asked})
            for target, future in asked:
                if not future.done():
                    future.set_result(killed[target])
            await asyncio.sleep((time.monotonic() - began) * PAUSE)


def kill_once(targets: Collection[Target]) -> dict[Target, int]:
    """Look once at every process and kill those that carry a mark, or are in a namespace; returns how many of each."""
    by_mark: dict[bytes, list[Target]] = {}
    by_namespace: dict[int | None, list[Target]] = {}
    for target in targets:
        by_mark.setdefault(target[0].encode(), []).append(target)
        if target[1] is not None:
            by_namespace.setdefault(target[1], []).append(target)
    killed = dict.fromkeys(targets, 0)
    families = Families() if by_namespace else None
    seen: set[str] = set()
    # A process may start another one and end between the listing and the look at it: list until nothing is new.
    while new := _processes() - seen:
        seen |= new
        for entry in new:
            found = set(by_namespace.get(families.of(entry), ())) if families is not None else set()
            if found and not at_work(entry):
                continue
            if not found:
                value = _mark_of(entry)
                whole = value.partition(b".")[0] + b"."
                found = {target for mark in (value, whole) for target in by_mark.get(mark, ())}
            if found:
                with suppress(ProcessLookupError):
                    os.kill(int(entry), signal.SIGKILL)
            for target in found:
                killed[target] += 1
    return killed


def marked_processes(mark: str) -> list[str]:
    """The ids of the processes that carry `mark`, which is as for `kill`."""
    wanted = mark.encode()
    return [entry for entry in _processes() if _mark_of(entry).startswith(wanted)]


def at_work(pid: str) -> bool:
    """Whether a process lives and is not about to end."""
    with suppress(OSError):
        return _lives(_stat(pid))
    return False


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
            # Asked before the environment is read again: `execve` may end between the two.
            if environment or (executing := _executing(pid)) is None:
                break
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


def _executing(pid: str) -> bool | None:
    """Whether a process is in the middle of `execve`, when it has no environment yet; None: it will never have one.

    See proc(5), stat.
    """
    fields = _stat(pid)
    return fields[48] == b"0" if _lives(fields) else None


def _stat(pid: str) -> list[bytes]:
    """The fields of a process from its state on, which is field 3 of proc(5). Raises OSError."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(file, 4096).rpartition(b") ")[2].split()
    finally:
        os.close(file)


def _lives(fields: list[bytes]) -> bool:
    """Whether that is a program at work: no kernel thread, and neither dead nor about to be."""
    return fields[0] not in (b"Z", b"X") and not int(fields[6]) & (_PF_KTHREAD | _PF_EXITING)
