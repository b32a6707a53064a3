"""Content-addressed blobs on a disk that every role can read: the body of a message that is too large for the bus.

A blob is fsynced before anybody can see a pointer to it, and lives as long as its run.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import BlobError, BlobRefused

_NAME: Final = re.compile(r"[0-9a-f]{64}\Z")


class BlobStore:
    """Blobs under one folder, named by their SHA-256. All methods block; call them in a thread when blobs are large."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Store `data` and return its name. Raises BlobRefused when the disk does."""
        name = hashlib.sha256(data).hexdigest()
        path = self._path(name)
        if path.exists():
            return name
        aside = path.parent / f".{name[:16]}-{secrets.token_hex(8)}"
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
        return name

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

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
