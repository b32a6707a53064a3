"""Content-addressed blobs on a disk that every role can read: what is too large for the bus, or recurs in its records.

A blob is fsynced before anybody can see its name, and lives until nothing refers to it any more: pipeline/sweep.py. Its
time is that of its last `put`, so that what was just named is not removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import BlobError, BlobRefused

_NAME: Final = re.compile(r"[0-9a-f]{64}\Z")
_LEAVING: Final = ".leaving-"
_LEFT: Final = re.compile(re.escape(_LEAVING) + r"([0-9a-f]{64})-")


class BlobStore:
    """Blobs under one folder, named by their SHA-256. All methods block; call them in a thread when blobs are large."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Store `data` and return its name. Raises BlobRefused when the disk does."""
        name = hashlib.sha256(data).hexdigest()
        path = self._path(name)
        try:
            os.utime(path)
        except OSError:
            # It is not there, or somebody else's: then ours takes its place.
            self._write(path, data)
        return name

    def _write(self, path: Path, data: bytes) -> None:
        aside = path.parent / f".{path.name[:16]}-{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
            sync_folder(path.parent)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise BlobRefused(
                f"cannot write a blob of {len(data)} bytes under {self.folder}: {error.strerror}",
                hint="make room, or set [store] blobs to a folder that every role can write",
            ) from error

    def get(self, name: str) -> bytes:
        """Read a blob. Raises BlobError when it is missing or its bytes do not match its name."""
        if not _NAME.match(name):
            raise BlobError(f"{name[:80]!r} is no blob name")
        try:
            data = self._path(name).read_bytes()
        except OSError as error:
            raise BlobError(
                f"cannot read blob {name} under {self.folder}: {error.strerror}",
                hint="every role needs the same [store] blobs folder; `rollyard doctor` checks it",
            ) from error
        if hashlib.sha256(data).hexdigest() != name:
            raise BlobError(f"blob {name} under {self.folder} is damaged", hint="restore it from a backup")
        return data

    def __contains__(self, name: str) -> bool:
        return bool(_NAME.match(name)) and self._path(name).exists()

    def now_ns(self) -> int:
        """The time by the clock of the file system, which is the one that dates blobs. Raises OSError."""
        probe = self.folder / f".clock-{secrets.token_hex(8)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        try:
            return probe.stat().st_mtime_ns
        finally:
            probe.unlink()

    def names(self) -> Iterator[str]:
        """Every blob. Raises OSError."""
        return (entry.name for entry, _ in self._files() if _NAME.match(entry.name))

    def before(self, time_ns: int) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every blob that was put before that time. Raises OSError."""
        for entry, status in self._files():
            if _NAME.match(entry.name) and status.st_mtime_ns < time_ns:
                yield entry.name, status.st_size

    def tidy(self, time_ns: int) -> None:
        """Undo removals that died half-way, and remove what writes left that died before that time. Raises OSError."""
        for entry, status in self._files():
            if left := _LEFT.match(entry.name):
                self._bring_back(Path(entry.path), left[1])
            elif entry.name.startswith(".") and status.st_mtime_ns < time_ns:
                Path(entry.path).unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for folder in sorted(path for path in self.folder.glob("??") if path.is_dir()):
            for entry in list(os.scandir(folder)):
                with suppress(FileNotFoundError):
                    yield entry, entry.stat()

    def remove(self, name: str, put_before_ns: int) -> bool:
        """Remove a blob, unless it was put again since that time; returns whether it is gone. Raises OSError."""
        path = self._path(name)
        leaving = path.with_name(f"{_LEAVING}{name}-{secrets.token_hex(8)}")
        try:
            # Out of the way first: whoever puts it from now on writes it anew, whoever has just put it is seen here.
            path.rename(leaving)
            if leaving.stat().st_mtime_ns < put_before_ns:
                leaving.unlink()
                return True
            self._bring_back(leaving, name)
        except FileNotFoundError:
            # Another one removes blobs too.
            pass
        return False

    def _bring_back(self, leaving: Path, name: str) -> None:
        with suppress(FileNotFoundError):
            # As if it were put now: it may take the place of one that was.
            os.utime(leaving)
            leaving.rename(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
