"""Which processes of this machine belong to which sandbox, by the user namespaces that they are in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollyard.stages.sandboxes.census import CENSUS, at_work
from rollyard.stages.sandboxes.families import Families

ROUNDS: Final = 20
MAX_PAUSE_S: Final = 0.1


def kin() -> dict[int, list[int]]:
    """One look over /proc: for each user namespace right below our own, the processes in it and in those below it."""
    families = Families()
    found: dict[int, list[int]] = {}
    for process in CENSUS.processes():
        if (family := CENSUS.family(process, families)) is not None:
            found.setdefault(family, []).append(int(process[0]))
    return found


def members(namespace: int | None, holder: int) -> list[int]:
    """The processes of a sandbox without its holder and what that waits for, which are a session of their own."""
    found = []
    for pid in kin().get(namespace, ()) if namespace is not None else ():
        with suppress(ProcessLookupError):
            if os.getsid(pid) != holder and at_work(pid):
                found.append(pid)
    return found


def kill_members(namespace: int, holder: int) -> None:
    """Kill all processes of a sandbox but its holder's, until none is left."""
    for number in range(ROUNDS):
        if not (pids := members(namespace, holder)):
            return
        _kill(pids, number)


def kill_strays(namespace: int) -> None:
    """Kill jails whose bwrap has ended.

    They die with it by themselves, unless an agent took over the first process of its jail (no program keeps it from
    tracing that one), and made it forget its mark and its parent.
    """
    for number in range(ROUNDS):
        family = set(kin().get(namespace, ()))
        strays = [pid for pid in family if at_work(pid) and _is_first(pid) and _parent(pid) not in family]
        if not strays:
            return
        _kill(strays, number)


def _kill(pids: Iterable[int], number: int) -> None:
    """Kill processes, and give them time to die: the more, the longer they take."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(min(0.001 * 2**number, MAX_PAUSE_S))


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
