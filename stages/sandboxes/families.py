"""The user namespaces of this machine's processes: those of a sandbox are all below its holder's.

A process can leave its group, its parent and its environment behind, but not the user namespaces above its own. Linux
only: elsewhere nothing is found.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Final

NS_GET_PARENT: Final = 0xB702
MAX_DEPTH: Final = 34


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

    def of(self, pid: str) -> tuple[bool, int | None]:
        """Whether it can be told, and the namespace; None: it is in our own or elsewhere, or cannot be told."""
        namespace = namespace_of(pid)
        if namespace is None or namespace == self._own:
            return namespace is not None, None
        if namespace not in self._tops:
            self._tops[namespace] = _top(pid, self._own)
        return self._tops[namespace] is not None, self._tops[namespace]


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
