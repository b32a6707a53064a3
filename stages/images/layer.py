"""The upper layer of an overlay: copying it, and reading what it changes.

An agent may be at work in it meanwhile, and may have planted links: everything is opened by its folder's descriptor and
never through a link.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

OPAQUE: Final = ("user.overlay.opaque", "trusted.overlay.opaque")


def copy_layer(source: Path, target: Path, owner: int | None = None) -> int:
    """Copy a layer with its whiteouts into an empty folder; returns its bytes. Sockets and pipes are left out.

    Raises OSError.
    """
    with _opened(source) as folder:
        return _copy(folder, target, owner, {})


def _copy(folder: int, target: Path, owner: int | None, links: dict[tuple[int, int], Path]) -> int:
    copied_bytes = 0
    for name in sorted(os.listdir(folder)):
        with suppress(FileNotFoundError):  # it went away meanwhile
            copied_bytes += _copy_entry(folder, name, target / name, owner, links)
    return copied_bytes


def _copy_entry(folder: int, name: str, target: Path, owner: int | None, links: dict[tuple[int, int], Path]) -> int:
    state = os.lstat(name, dir_fd=folder)
    copied_bytes = 0
    if stat.S_ISDIR(state.st_mode):
        with _opened(name, folder) as inner:
            target.mkdir(mode=0o700)
            _copy_opaque(inner, target)
            copied_bytes = _copy(inner, target, owner, links)
            target.chmod(stat.S_IMODE(state.st_mode) & 0o1777 | 0o700)
    elif stat.S_ISLNK(state.st_mode):
        target.symlink_to(os.readlink(name, dir_fd=folder))
    elif is_whiteout(state):
        os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))
    elif stat.S_ISREG(state.st_mode):
        first = links.setdefault((state.st_dev, state.st_ino), target) if state.st_nlink > 1 else target
        if first != target:
            os.link(first, target)
            return 0
        with _opened(name, folder, os.O_NONBLOCK) as file:
            copied_bytes = _copy_file(file, target)
            target.chmod(stat.S_IMODE(state.st_mode) & 0o777 | 0o400)
    else:
        return 0
    if owner is not None:
        os.lchown(target, owner, owner)
    if not is_whiteout(state):
        os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns), follow_symlinks=False)
    return copied_bytes


def _copy_file(file: int, target: Path) -> int:
    with os.fdopen(os.dup(file), "rb") as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        return copy.tell()


def _copy_opaque(folder: int, target: Path) -> None:
    if is_opaque(folder):
        os.setxattr(target, OPAQUE[0], b"y")


def is_opaque(folder: int | Path) -> bool:
    """Whether a folder of a layer hides what lower ones have there."""
    for name in OPAQUE:
        with suppress(OSError):
            if os.getxattr(folder, name) == b"y":
                return True
    return False


def is_whiteout(state: os.stat_result) -> bool:
    """Whether an entry of a layer says that there is nothing."""
    return stat.S_ISCHR(state.st_mode) and state.st_rdev == 0


def entries(layer: Path) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Every entry of a layer, as a path with a leading slash, parents first, and whether it is an opaque folder."""
    with _opened(layer) as folder:
        yield from _entries(folder, "")


def _entries(folder: int, prefix: str) -> Iterator[tuple[str, os.stat_result, bool]]:
    for name in sorted(os.listdir(folder)):
        try:
            state = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            continue
        path = f"{prefix}/{name}"
        if not stat.S_ISDIR(state.st_mode):
            yield path, state, False
            continue
        with suppress(FileNotFoundError, NotADirectoryError), _opened(name, folder) as inner:
            yield path, state, is_opaque(inner)
            yield from _entries(inner, path)


@contextmanager
def _opened(name: str | Path, folder: int | None = None, flags: int = os.O_DIRECTORY) -> Iterator[int]:
    """A descriptor of an entry, never through a link; an owner who may not read it is let for the moment."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW
    mode: int | None = None
    try:
        file = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            os.chmod(f"/proc/self/fd/{handle}", mode | 0o700)  # noqa: PTH101 - the file of the handle
        finally:
            os.close(handle)
        file = os.open(name, flags, dir_fd=folder)
    try:
        yield file
    finally:
        if mode is not None:
            with suppress(OSError):
                os.fchmod(file, mode)
        os.close(file)
