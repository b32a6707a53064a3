"""From a plan to a jail: which trees, which folders, which limits."""

from __future__ import annotations

import posixpath
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.images.store import Image, ImageStore, StoredImage
from rollyard.stages.sandbox import Mount, Plan
from rollyard.stages.sandboxes.jail import Bind, Jail, Keeping
from rollyard.stages.sandboxes.jail_settings import BubblewrapSettings

TOP: Final = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
NETWORK_FILES: Final = ("/etc/resolv.conf", "/etc/hosts")
_ODD: Final = frozenset(":,\\\n")


@dataclass(frozen=True, slots=True)
class Planned:
    """A jail that can be made: how its holder is started, and the lock of its image that the holder keeps."""

    jail: Jail
    keeping: Keeping
    lock: Path | None


def plan_jail(defaults: BubblewrapSettings, images: ImageStore, plan: Plan, folder: Path, uid: int | None) -> Planned:
    """What a plan comes to for the sandbox in `folder`.

    Raises SandboxError for an image that is not there, or is another user's.
    """
    stored = _image(images, plan.image, uid)
    needed = [folder, *(stored.layers if stored else ()), *(mount.source for mount in plan.mounts)]
    hidden = uid is not None and not all(map(_open_to_all, needed))
    workdir = _absolute(plan.workdir or _workdir_of(stored) or defaults.workdir, "the working directory")
    shown: list[str] = []

    def source(path: Path) -> str:
        """Where a folder is in the holder's namespace."""
        if not hidden:
            return str(path)
        shown.append(str(path))
        return f"/tmp/s{len(shown) - 1}"

    root = source(folder.parent)
    layers = tuple(source(layer) for layer in stored.layers) if stored else ()
    mounts = tuple(Bind(source(mount.source), _absolute(mount.target, "a mount")) for mount in _mounts(plan))
    if stored and plan.read_only:
        _check_plain(stored.layers, (workdir, defaults.home, "/tmp"))
    jail = Jail(
        image=plan.image,
        layers=layers,
        host=tuple(_host(() if stored else defaults.host, plan)),
        links=() if stored else tuple(_links()),
        mounts=mounts,
        base="/tmp/base" if hidden else str(folder / "state"),
        until_s=time.time() + plan.deadline_s,
        workdir=workdir,
        home=defaults.home,
        env=dict(stored.image.env) if stored else {},
        network=plan.network,
        read_only=plan.read_only,
        uid=uid,
        nested=defaults.nested_namespaces,
        memory_bytes=plan.limits.memory_bytes or defaults.memory_bytes or None,
        disk_bytes=plan.limits.disk_bytes or defaults.disk_bytes,
        max_processes=plan.limits.max_processes or defaults.max_processes or None,
        max_file_bytes=plan.limits.max_file_bytes or defaults.max_file_bytes,
    )
    keeping = Keeping(
        state=str(folder / "state"),
        shown=tuple(shown),
        lease=f"{root}/lease",
        folder=f"{root}/{folder.name}",
        lease_s=defaults.lease_s,
        deadline_s=plan.deadline_s,
    )
    return Planned(jail, keeping, stored.lock if stored else None)


def _open_to_all(path: Path) -> bool:
    """Whether every user can get to a folder."""
    try:
        return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))
    except OSError:
        return False


def _image(images: ImageStore, name: str, uid: int | None) -> StoredImage | None:
    if not name:
        return None
    if not name.startswith("/"):
        stored = images.get(name)
    elif Path(name).is_dir():
        stored = StoredImage(Image(name=name), (Path(name),))
    else:
        raise SandboxError(f"there is no folder {name} to be the root of a sandbox", hint="see sandbox.image")
    for layer in stored.layers:
        _check_owner(layer, name, uid)
    return stored


def _check_owner(layer: Path, name: str, uid: int | None) -> None:
    if _ODD & set(str(layer)):
        raise SandboxError(
            f"the path {str(layer)!r} holds one of ':', ',' and '\\', which no overlay takes", hint="move the image"
        )
    try:
        owner = layer.stat().st_uid
    except OSError as error:
        raise SandboxError(f"the image {name!r} cannot be used: {error}") from error
    wanted = uid if uid is not None else Path("/proc/self").stat().st_uid
    if owner != wanted:
        raise SandboxError(
            f"the image {name!r} belongs to user {owner}, and its sandboxes run as {wanted}: they could change nothing",
            hint=f"`rollyard image import {layer} --name NAME` makes a copy that can be used",
        )


def _workdir_of(stored: StoredImage | None) -> str:
    workdir = stored.image.workdir if stored else ""
    return "" if workdir == "/" else workdir


def _absolute(path: str, what: str) -> str:
    normal = posixpath.normpath(path)
    if not path.startswith("/") or normal == "/" or "\0" in path:
        raise SandboxError(f"{what} {path!r} is no absolute path below the root", hint="write for example '/work'")
    return "/" + normal.lstrip("/")


def _mounts(plan: Plan) -> Iterable[Mount]:
    for mount in plan.mounts:
        if not mount.source.is_dir():
            raise SandboxError(f"there is no folder {mount.source} to be mounted at {mount.target}")
        yield mount


def _host(folders: Iterable[str], plan: Plan) -> Iterable[Bind]:
    """Folders and files of this machine that are seen inside: its names of hosts, and what stands for an image."""
    for path in (*folders, *(NETWORK_FILES if plan.network == "open" else ())):
        if Path(path).exists():
            yield Bind(str(Path(path).resolve()), path)
    for path in () if plan.image else TOP:
        if Path(path).is_dir() and not Path(path).is_symlink():
            yield Bind(path, path)


def _links() -> Iterable[Bind]:
    for path in TOP:
        if Path(path).is_symlink():
            yield Bind(str(Path(path).readlink()), path)


def _check_plain(layers: Iterable[Path], paths: Iterable[str]) -> None:
    """Refuse links on the way to what is bound from outside: they would be followed there."""
    for layer in layers:
        for path in paths:
            here = layer
            for part in path.strip("/").split("/"):
                here = here / part
                try:
                    if stat.S_ISLNK(here.lstat().st_mode):
                        raise SandboxError(
                            f"{path!r} is a link in the image, or behind one",
                            hint="with sandbox.read_only it must be a folder: set sandbox.workdir",
                        )
                except (FileNotFoundError, NotADirectoryError):
                    break
