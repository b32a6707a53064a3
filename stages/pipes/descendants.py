"""Finding processes below another one, by the command line of the first. Linux only: elsewhere nothing is found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path


def family(pid: int, argv: Sequence[str]) -> list[int]:
    """What runs in the jail: the last process on the way down from `pid` whose command line ends with `argv`, and those
    below it that are in its process group; `pid` and those below it when there is none.

    A program that enters a jail carries the command line of what it will run there, so the last one is inside. What
    stands before it may be of the same group, and must not be hit.
    """
    tail = b"\0".join(part.encode(errors="surrogateescape") for part in argv) + b"\0"
    children = _children()
    first = pid
    for level in _levels(pid, children):
        first = next((child for child in level if _command_line(child).endswith(tail)), first)
    group = _group(first)
    return [first, *(child for level in _levels(first, children) for child in level if _group(child) == group)]


def _levels(pid: int, children: dict[int, list[int]]) -> Iterator[list[int]]:
    level = [pid]
    while level := [child for parent in level for child in children.get(parent, ())]:
        yield level


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    return children


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
