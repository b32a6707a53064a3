"""What processes of this machine use, as /proc shows it. Linux only: elsewhere nothing is found."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.stages.sandbox import Stats
from rollyard.stages.sandboxes.marked import marked_processes

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Used:
    """By one process: resident bytes, and processor seconds of itself and its ended children."""

    memory_bytes: int
    cpu_s: float
    threads: int


def used(pid: int | str) -> Used | None:
    """What a process uses; None: it has ended, though its parent may not know yet."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        if fields[0] in (b"Z", b"X"):
            return None
        ticks = sum(int(field) for field in fields[11:15])
        return Used(int(fields[21]) * PAGE_BYTES, ticks / TICKS, int(fields[17]))
    return None


def total(pids: Iterable[int | str], disk_bytes: int | None = None) -> Stats:
    """What these processes use together."""
    each = [found for pid in pids if (found := used(pid)) is not None]
    return Stats(
        memory_bytes=sum(one.memory_bytes for one in each),
        cpu_s=sum(one.cpu_s for one in each),
        processes=len(each),
        disk_bytes=disk_bytes,
    )


def used_by_marked(mark: str) -> Stats:
    """What the processes use that carry a mark."""
    return total(marked_processes(mark))
