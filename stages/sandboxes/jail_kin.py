"""Which processes of this machine belong to which sandbox, by the user namespaces that they are in.

A process can leave its group, its parent and its environment behind, but not the user namespaces above its own: those
of a sandbox are all below its holder's. Linux only: elsewhere nothing is found.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

NS_GET_PARENT: Final = 0xB702
MAX_DEPTH: Final = 34
ROUNDS: Final = 20
_PF_EXITING: Final = 0x4


def namespace_of(pid: int | str) -> int | None:
    """What tells the user namespace of a process from all others; None: it has ended, or is another user's."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/user").st_ino  # noqa: PTH116 - Path objects cost thrice
    return None


class Families:
    """Which user namespace right below our own a process is in or below. Good for one look over all processes: the
    kernel uses the numbers of namespaces again."""

    def __init__(self) -> None:
        self._own = namespace_of("self")
        self._tops: dict[int, int | None] = {}

    def of(self, pid: str) -> int | None:
        """None: it is in our own namespace or elsewhere, or has ended."""
        namespace = namespace_of(pid)
        if namespace is None or namespace == self._own:
            return None
        if namespace not in self._tops:
            self._tops[namespace] = _top(pid, self._own)
        return self._tops[namespace]


def kin() -> dict[int, list[int]]:
    """One look over /proc: for each user namespace right below our own, the processes in it and in those below it."""
    families = Families()
    found: dict[int, list[int]] = {}
    try:
        entries = os.listdir("/proc")  # noqa: PTH208 - Path objects cost thrice
    except FileNotFoundError:
        return {}
    for entry in entries:
        if entry.isdigit() and (family := families.of(entry)) is not None:
            found.setdefault(family, []).append(int(entry))
    return found


def members(namespace: int | None, holder: int) -> list[int]:
    """The processes of a sandbox without its holder and what that waits for, which are a session of their own."""
    found = []
    for pid in kin().get(namespace, ()) if namespace is not None else ():
        with suppress(ProcessLookupError):
            if os.getsid(pid) != holder and lives(pid):
                found.append(pid)
    return found


def kill_members(namespace: int, holder: int) -> None:
    """Kill all processes of a sandbox but its holder's, until none is left."""
    for _ in range(ROUNDS):
        if not (pids := members(namespace, holder)):
            return
        _kill(pids)


def kill_strays(namespace: int) -> None:
    """Kill jails whose bwrap has ended.

    They die with it by themselves, unless an agent took over the first process of its jail (no program keeps it from
    tracing that one), and made it forget its mark and its parent.
    """
    for _ in range(ROUNDS):
        family = set(kin().get(namespace, ()))
        strays = [pid for pid in family if lives(pid) and _is_first(pid) and _parent(pid) not in family]
        if not strays:
            return
        _kill(strays)


def lives(pid: int) -> bool:
    """Whether a process is neither dead nor about to be."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return fields[0] not in "ZX" and not int(fields[6]) & _PF_EXITING
    return False


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _is_first(pid: int) -> bool:
    """Whether a process is the first one of a process namespace below our own."""
    ids = _status(pid, "NSpid:")
    return len(ids) > 1 and ids[-1] == "1"


def _parent(pid: int) -> int:
    return int(next(iter(_status(pid, "PPid:")), "0"))


def _status(pid: int, field: str) -> list[str]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return line.split()[1:]
    return []


def _top(pid: str, own: int | None) -> int | None:
    """The namespace right below our own on the way up from that of a process."""
    try:
        file = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    except OSError:
        return None
    for _ in range(MAX_DEPTH):
        here = os.fstat(file).st_ino
        try:
            parent = fcntl.ioctl(file, NS_GET_PARENT)
        except OSError:  # it is above ours
            return None
        finally:
            os.close(file)
        file = parent
        if os.fstat(file).st_ino == own:
            os.close(file)
            return here
    os.close(file)
    return None
