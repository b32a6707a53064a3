"""The image store: root trees of this machine, by name. `rollyard image import` fills it, snapshots are kept in it.

<store>/<name, as in a URL>/    image.json  lock  root/
<store>/.new-*/                 one that is being made; whoever died at it left it
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from rollyard.schemas.errors import SandboxError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,199}\Z")
_NEW: Final = ".new-"
_OLD: Final = ".old-"
STALE_S: Final = 3600.0


class Image(Struct, frozen=True, kw_only=True):
    """What the store knows of an image beside its files."""

    name: str
    source: str = ""
    created_ms: int = 0
    env: dict[str, str] = {}
    workdir: str = ""
    base: str = ""  # a snapshot's: the image, or the absolute folder, that its files come over
    bytes: int = 0
    uid: int = 0


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image and where its files are: trees, the uppermost first. `lock` is held, shared, by whoever uses them."""

    image: Image
    layers: tuple[Path, ...]
    lock: Path | None = None


class ImageStore:
    """The images below one folder, which need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> StoredImage:
        """The image of that name. Raises SandboxError."""
        image = self._read(name)
        layers = [self._path(name) / "root"]
        seen = {name}
        base = image.base
        while base:
            if base.startswith("/"):
                layers.append(Path(base))
                break
            if base in seen:
                raise SandboxError(f"the image {name!r} is its own base", hint="remove it: `rollyard image rm`")
            seen.add(base)
            layers.append(self._path(base) / "root")
            base = self._read(base).base
        return StoredImage(image, tuple(layers), self._path(name) / "lock")

    def names(self) -> list[str]:
        """The names of all images, sorted."""
        try:
            entries = [unquote(entry.name) for entry in self.folder.iterdir() if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
        return sorted(name for name in entries if _NAME.match(name))

    def list(self) -> list[Image]:
        """All images, by name."""
        images = []
        for name in self.names():
            with suppress(SandboxError):
                images.append(self._read(name))
        return images

    def remove(self, name: str) -> None:
        """Remove an image. Raises SandboxError when there is none, a sandbox uses it, or a snapshot is based on it."""
        self._read(name)
        above = [image.name for image in self.list() if image.base == name]
        if above:
            raise SandboxError(f"the image {name!r} is the base of {above[0]!r}", hint="remove that one first")
        path = self._path(name)
        with self._unused(path / "lock", name):
            old = self._aside(_OLD)
            path.rename(old)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def adding(self, name: str, *, replace: bool = False) -> Iterator[Path]:
        """A folder to fill: `root` is in it, `image.json` is to be written with `write`. At the end of the block it is
        in the store; when the block fails nothing is. Raises SandboxError for a name that is taken."""
        if not _NAME.match(name):
            raise SandboxError(f"{name!r} is no name of an image", hint="use letters, digits and . _ / : @ -")
        path = self._path(name)
        if path.exists() and not replace:
            raise SandboxError(f"there is an image {name!r} already", hint="remove it, or give --replace")
        new = self._aside(_NEW)
        try:
            (new / "root").mkdir(parents=True, mode=0o755)
            (new / "lock").touch()
            yield new
            if path.exists():
                self.remove(name)
            new.rename(path)
        except OSError as error:
            raise SandboxError(f"the image {name!r} cannot be stored in {self.folder}: {error}") from error
        finally:
            _remove(new)

    def write(self, new: Path, image: Image) -> None:
        """Write the record of an image that is being added."""
        (new / "image.json").write_bytes(msgspec.json.format(msgspec.json.encode(image)))

    def sweep(self) -> None:
        """Remove what imports that were killed left behind."""
        with suppress(FileNotFoundError):
            for entry in self.folder.iterdir():
                if entry.name.startswith((_NEW, _OLD)) and time.time() - entry.stat().st_mtime > STALE_S:
                    _remove(entry)

    def _read(self, name: str) -> Image:
        if _NAME.match(name):
            with suppress(FileNotFoundError, NotADirectoryError):
                try:
                    return msgspec.json.decode((self._path(name) / "image.json").read_bytes(), type=Image)
                except msgspec.MsgspecError as error:
                    raise SandboxError(f"the record of the image {name!r} cannot be read: {error}") from error
        known = ", ".join(self.names()[:20]) or "none"
        raise SandboxError(
            f"there is no image {name!r} in {self.folder}",
            hint=f"import it: `rollyard image import SOURCE --name {name}`; there are: {known}",
        )

    def _path(self, name: str) -> Path:
        return self.folder / quote(name, safe="")

    def _aside(self, prefix: str) -> Path:
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        return self.folder / f"{prefix}{secrets.token_hex(8)}"

    @contextmanager
    def _unused(self, lock: Path, name: str) -> Iterator[None]:
        """Hold the lock that sandboxes share. Raises SandboxError when one of them lives."""
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SandboxError(f"the image {name!r} cannot be locked: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise SandboxError(f"sandboxes use the image {name!r}", hint="wait until they have ended") from error
        finally:
            os.close(file)


def now_ms() -> int:
    """Unix time in ms."""
    return int(time.time() * 1000)


def _remove(folder: Path) -> None:
    """Remove a tree, folders without permissions too."""
    if not folder.exists():
        return
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(parent, name)
            if not path.is_symlink() and not os.access(path, os.W_OK | os.X_OK):
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
