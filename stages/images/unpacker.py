"""Unpacking archives below a folder so that nothing lands outside, whatever is in them or was there before."""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from rollyard.schemas.errors import SandboxError

WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"
MAX_LINKS: Final = 40
COPY_BYTES: Final = 1 << 20
_AUFS: Final = ".wh..wh."


@dataclass(kw_only=True)
class Unpacker:
    """Unpacks one archive after another below `root`.

    With `image` they are layers of an image: links on the way to a member stay inside `root`, as they do for whoever
    has it as "/"; whiteouts remove; devices and pipes are left out; the owner may read every file. Else links on the
    way and special files are refused, and a folder is not replaced by a file.
    """

    root: Path
    image: bool = False
    owner: int | None = None  # uid and gid of all that is made; None: as it comes
    max_bytes: int | None = None
    on_bytes: Callable[[int], None] = lambda _: None
    left_out: int = 0  # devices and pipes
    _bytes: int = 0
    _fresh: set[str] = field(default_factory=set)
    _folders: dict[str, tuple[int, float]] = field(default_factory=dict)

    def apply(self, archive: tarfile.TarFile) -> None:
        """Unpack all members. Raises SandboxError that names the member; OSError and TarError are the caller's."""
        self._fresh.clear()
        for member in archive:
            try:
                self._apply(archive, member)
            except OSError as error:
                raise SandboxError(f"the member {member.name!r} cannot be unpacked: {error}") from error
            archive.members = []  # type: ignore[attr-defined]  # or it would keep them all

    def finish(self) -> None:
        """Give folders their modes and times, which could have kept us from writing into them."""
        for path, (mode, mtime) in sorted(self._folders.items(), reverse=True):
            with suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    Path(path).chmod(mode)
                    os.utime(path, (mtime, mtime))
        self._folders.clear()

    def _apply(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = posixpath.normpath(member.name)
        if self.image:
            name = name.lstrip("/") or "."
        if name.startswith(("/", "../")) or name == "..":
            raise SandboxError(f"the member {member.name!r} leaves the folder that it is unpacked in")
        folder, _, base = name.rpartition("/")
        if self.image and base.startswith(WHITEOUT):
            self._white_out(folder, base)
            return
        if name == ".":
            if member.isdir():
                self._folders[str(self.root)] = (self._mode(member, 0o700), member.mtime)
            return
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            if not self.image:
                raise SandboxError(f"the member {member.name!r} is neither file, folder nor link")
            self.left_out += 1
            return
        parent = self._folder(folder, member.name)
        path = f"{parent}/{base}"
        self._make_room(path, member)
        self._make(archive, member, path)
        self._fresh.add(path)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            with suppress(FileExistsError):
                Path(path).mkdir(mode=0o700)
            self._folders[path] = (self._mode(member, 0o700), member.mtime)
        elif member.issym():
            Path(path).symlink_to(member.linkname)
        elif member.islnk():
            os.link(self._link_source(member), path, follow_symlinks=False)
            return
        else:
            source = archive.extractfile(member)
            assert source is not None
            self._write(source, path)
            Path(path).chmod(self._mode(member, 0o400 if self.image else 0))
        if self.owner is not None:
            os.lchown(path, self.owner, self.owner)
        if not member.isdir():
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _write(self, source: IO[bytes], path: str) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "wb") as target:
            while data := source.read(COPY_BYTES):
                self._bytes += len(data)
                if self.max_bytes is not None and self._bytes > self.max_bytes:
                    raise SandboxError(f"the archive has over {self.max_bytes} bytes unpacked")
                target.write(data)
                self.on_bytes(len(data))

    def _mode(self, member: tarfile.TarInfo, at_least: int) -> int:
        # Nobody changes user inside, so set-user-id bits would only be a risk outside.
        return member.mode & (0o1777 if member.isdir() else 0o777) | at_least

    def _make_room(self, path: str, member: tarfile.TarInfo) -> None:
        """Take away what stands where a member goes, unless both are folders."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            if member.isdir():
                return
            if not self.image:
                raise SandboxError(f"the member {member.name!r} would replace a folder")
            shutil.rmtree(path)
        else:
            Path(path).unlink()

    def _link_source(self, member: tarfile.TarInfo) -> str:
        name = posixpath.normpath(member.linkname)
        if self.image:
            name = name.lstrip("/")
        if name.startswith(("/", "../")) or name in ("", ".", ".."):
            raise SandboxError(f"the member {member.name!r} is a hard link to what is elsewhere: {member.linkname!r}")
        folder, _, base = name.rpartition("/")
        source = f"{self._folder(folder, member.name)}/{base}"
        if not os.path.lexists(source):
            raise SandboxError(f"the member {member.name!r} is a hard link to what is not there: {member.linkname!r}")
        if not self.image and Path(source).is_symlink():
            raise SandboxError(f"the member {member.name!r} is a hard link to a link: {member.linkname!r}")
        return source

    def _folder(self, path: str, name: str) -> str:
        """Where the folder `path` really is, made if need be. Raises SandboxError."""
        done: list[str] = []
        left = path.split("/")[::-1]
        links = 0
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del done[-1:]
                continue
            here = "/".join((str(self.root), *done, part))
            try:
                mode = os.lstat(here).st_mode
            except FileNotFoundError:
                self._make_folder(here)
                mode = stat.S_IFDIR
            if stat.S_ISLNK(mode):
                links += 1
                if not self.image or links > MAX_LINKS:
                    raise SandboxError(f"the member {name!r} leaves the folder that it is unpacked in, through a link")
                target = os.readlink(here)  # noqa: PTH115 - as text
                done = [] if target.startswith("/") else done
                left.extend(target.split("/")[::-1])
            elif stat.S_ISDIR(mode):
                done.append(part)
            else:
                raise SandboxError(f"the member {name!r} is below a file")
        return "/".join((str(self.root), *done))

    def _make_folder(self, path: str) -> None:
        Path(path).mkdir(mode=0o755)
        self._fresh.add(path)
        if self.owner is not None:
            os.lchown(path, self.owner, self.owner)

    def _white_out(self, folder: str, base: str) -> None:
        """Remove what lower layers have there, and this one has not."""
        parent = self._folder(folder, f"{folder}/{base}")
        if base == OPAQUE:
            for entry in list(os.scandir(parent)):
                self._remove(entry.path)
        elif not base.startswith(_AUFS) and base != WHITEOUT:
            hidden = base.removeprefix(WHITEOUT)
            if hidden in (".", ".."):
                raise SandboxError(f"the whiteout {base!r} names no file")
            self._remove(f"{parent}/{hidden}")

    def _remove(self, path: str) -> None:
        if path in self._fresh:
            # A folder that this layer has may hold what lower ones had.
            if Path(path).is_dir() and not Path(path).is_symlink():
                for entry in list(os.scandir(path)):
                    self._remove(entry.path)
            return
        try:
            if Path(path).is_dir() and not Path(path).is_symlink():
                if any(fresh.startswith(f"{path}/") for fresh in self._fresh):
                    for entry in list(os.scandir(path)):
                        self._remove(entry.path)
                else:
                    shutil.rmtree(path)
            else:
                Path(path).unlink()
        except FileNotFoundError:
            return
