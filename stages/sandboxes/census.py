"""The processes of this machine, their marks and user namespaces: looked up once, remembered while it cannot change.

A look over /proc would cost 15 us a process. It costs 2 us for those that are known, which are told from later ones of
the same number by the inode number of their folder in /proc: that is given out when the folder is first seen.

What can be remembered follows from how sandboxes start processes (shim.sh, jail_holder.py, pipes/):

- The first program that a process of ours executes has the mark in its environment already, so one that has executed
  a program and carries none will carry none. One that was forked only may execute a marked one, and is not remembered.
- Only marked processes enter the user namespace of a sandbox, and no way leads out of it.

Linux only: elsewhere nothing is found.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final, Literal, TypeVar

from rollyard.stages.sandboxes.families import Families

VARIABLE: Final = "ROLLYARD_PROCESS"

_V = TypeVar("_V")

Key = tuple[str, int]
"""A process: its id, and the inode number of its folder."""

Kind = Literal["kernel", "settled", "forked", "dead", "unknown"]
"""A thread of the kernel; has executed a program since it was forked; has not; has ended; the kernel does not tell."""

_NEEDLE: Final = VARIABLE.encode() + b"="
_CHUNK_BYTES: Final = 8192
_EXEC_LOOKS: Final = 100
_EXEC_PAUSE_S: Final = 0.001
_PF_EXITING: Final = 0x4
_PF_FORKNOEXEC: Final = 0x40
_PF_KTHREAD: Final = 0x0020_0000


class Census:
    """Remembers processes. Threads may share one: what two of them find at a time is the same."""

    def __init__(self) -> None:
        self._marks: dict[Key, bytes] = {}
        self._forked: dict[Key, bytes] = {}  # of those that have executed nothing since, and so as long as they do not
        self._families: dict[Key, int | None] = {}

    def processes(self) -> set[Key]:
        """All of them as /proc lists them; forgets those that have ended."""
        listed: set[Key] = set()
        with suppress(FileNotFoundError), os.scandir("/proc") as entries:
            listed = {(entry.name, entry.inode()) for entry in entries if entry.name.isdigit()}
        if len(self._marks) + len(self._families) > 4 * len(listed):
            self._marks = _only(self._marks, listed)
            self._families = _only(self._families, listed)
            self._forked = _only(self._forked, listed)
        return listed

    def mark(self, process: Key) -> bytes:
        """The mark that a process carries; empty when it has none, is dead, or belongs to somebody else.

        One that has ended meanwhile still has the mark that is remembered.
        """
        if (known := self._marks.get(process)) is not None:
            return known
        kind = _kind(process[0])  # asked before its environment is read
        if kind == "forked" and (known := self._forked.get(process)) is not None:
            return known
        mark = b"" if kind in ("kernel", "dead") else _mark_of(process[0])
        if kind == "forked" and mark is not None:
            self._forked[process] = mark
        elif kind in ("kernel", "settled") and mark is not None:
            self._marks[process] = mark
        return mark or b""

    def family(self, process: Key, families: Families) -> int | None:
        """The user namespace right below our own that it is in or below; None: none, or it cannot be told."""
        if process in self._families:
            return self._families[process]
        known, family = families.of(process[0])
        if family is not None or (known and self.mark(process) == b"" and process in self._marks):
            self._families[process] = family
        return family


CENSUS: Final = Census()
"""Of this machine, for all that this process does."""


def at_work(pid: int | str) -> bool:
    """Whether a process lives and is not about to end, or has a thread of which that is true."""
    with suppress(OSError):
        fields = _stat(pid)
        if int(fields[6]) & _PF_KTHREAD:
            return False
        # A first thread may end before the others.
        return _lives(fields) or int(fields[17]) > 1
    return False


def _only(known: dict[Key, _V], listed: set[Key]) -> dict[Key, _V]:
    return {process: known[process] for process in listed if process in known}


def _kind(pid: str) -> Kind:
    """What sort of process it is, as for its mark."""
    with suppress(OSError):
        fields = _stat(pid)
        flags = int(fields[6])
        if flags & _PF_KTHREAD:
            return "kernel"
        if not _lives(fields):
            return "unknown" if int(fields[17]) > 1 else "dead"
        if flags:
            return "forked" if flags & _PF_FORKNOEXEC else "settled"
    return "unknown"


def _mark_of(pid: str) -> bytes | None:
    """The mark that a process carries, empty without one; None when it cannot be told."""
    try:
        environment = _whole_environment(pid)
    except OSError:
        return None
    before, found, after = environment.partition(_NEEDLE)
    return after.partition(b"\0")[0] if found and before[-1:] in (b"", b"\0") else b""


def _whole_environment(pid: str) -> bytes:
    """The environment of a process, also of one in the middle of `execve`. Raises OSError."""
    fields = _stat(pid)
    if not _lives(fields) and int(fields[17]) > 1:
        return _of_threads(pid)
    environment = _environment(pid)
    for _ in range(_EXEC_LOOKS):
        # Asked before the environment is read again: `execve` may end between the two.
        if environment or (executing := _executing(pid)) is None:
            return environment
        environment = _environment(pid)
        if not executing:
            return environment
        time.sleep(_EXEC_PAUSE_S)
    raise TimeoutError(f"the process {pid} is in execve for long")


def _of_threads(pid: str) -> bytes:
    """The environment of a process whose first thread has ended before the others."""
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - Path objects cost thrice
        with suppress(OSError):
            if environment := _environment(f"{pid}/task/{thread}"):
                return environment
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


def _stat(pid: int | str) -> list[bytes]:
    """The fields of a process from its state on, which is field 3 of proc(5). Raises OSError."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        return os.read(file, 4096).rpartition(b") ")[2].split()
    finally:
        os.close(file)


def _lives(fields: list[bytes]) -> bool:
    """Whether that is a program at work: no kernel thread, and neither dead nor about to be."""
    return fields[0] not in (b"Z", b"X") and not int(fields[6]) & (_PF_KTHREAD | _PF_EXITING)
