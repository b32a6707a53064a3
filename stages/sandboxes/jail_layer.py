"""What a bubblewrap sandbox has written: as a list of changes, or kept as an image."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollyard.schemas.errors import SandboxError
from rollyard.stages.images.layer import copy_layer, entries, is_whiteout
from rollyard.stages.images.store import Image, ImageStore, now_ms
from rollyard.stages.sandbox import Change
from rollyard.stages.sandboxes.jail import Jail


def keep(upper: Path, jail: Jail, images: ImageStore, nonce: str) -> str:
    """Store the upper layer as an image over the sandbox's; returns its name. Raises SandboxError."""
    name = f"snapshot-{nonce}-{now_ms()}"
    try:
        with images.adding(name) as new:
            size = copy_layer(upper, new / "root", jail.uid)
            if jail.uid is not None:
                os.lchown(new / "root", jail.uid, jail.uid)
            image = Image(
                name=name,
                source=f"snapshot of {jail.image}",
                created_ms=now_ms(),
                env=jail.env,
                workdir=jail.workdir,
                base=jail.image,
                bytes=size,
                uid=jail.uid if jail.uid is not None else os.getuid(),
            )
            images.write(new, image)
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be kept as an image: {error}") from error
    return name


def changes(upper: Path, lowers: Sequence[Path], jail: Jail) -> list[Change]:
    """What differs from the image, sorted. What mounts and jails need is left out."""
    try:
        found = list(_changes(upper, lowers, _own_paths(jail)))
    except OSError as error:
        raise SandboxError(f"what the sandbox has written cannot be read: {error}") from error
    return sorted(found, key=lambda change: change.path)


def _changes(upper: Path, lowers: Sequence[Path], own: frozenset[str]) -> Iterator[Change]:
    for path, state, opaque in entries(upper):
        below = _lower(lowers, path)
        if is_whiteout(state):
            if below is not None:
                yield Change(path, "deleted")
        elif below is None:
            if path not in own:
                yield Change(path, "added")
        elif not (stat.S_ISDIR(state.st_mode) and stat.S_ISDIR(below.st_mode)):
            if not _same(state, below):
                yield Change(path, "modified")
        elif opaque:
            yield from _hidden(lowers, upper, path)


def _hidden(lowers: Sequence[Path], upper: Path, path: str) -> Iterator[Change]:
    """What an opaque folder hides and does not have itself."""
    seen = set()
    for lower in lowers:
        folder = Path(f"{lower}{path}")
        if folder.is_symlink() or not folder.is_dir():
            continue
        for name, state, _ in entries(folder):
            whole = path + name
            if whole not in seen and not is_whiteout(state) and not os.path.lexists(f"{upper}{whole}"):
                seen.add(whole)
                yield Change(whole, "deleted")


def _lower(lowers: Sequence[Path], path: str) -> os.stat_result | None:
    """What the image has there, without following links in its last part."""
    for lower in lowers:
        try:
            state = os.lstat(f"{lower}{path}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        return None if is_whiteout(state) else state
    return None


def _same(state: os.stat_result, below: os.stat_result) -> bool:
    """A file that was copied up and not written: a touch shows in its time."""
    return (state.st_mode, state.st_size, state.st_mtime_ns) == (below.st_mode, below.st_size, below.st_mtime_ns)


def _own_paths(jail: Jail) -> frozenset[str]:
    """Folders that a jail makes for what it mounts, and for itself."""
    paths = ["/dev", "/proc", "/tmp", jail.workdir, jail.home]
    paths += [bind.target for bind in (*jail.host, *jail.links, *jail.mounts)]
    return frozenset(parent for path in paths for parent in _with_parents(path))


def _with_parents(path: str) -> Iterator[str]:
    while path not in ("", "/"):
        yield path
        path = path.rpartition("/")[0]
