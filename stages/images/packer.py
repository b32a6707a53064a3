"""Packing a file or folder of this machine as a tar archive, without following links."""

from __future__ import annotations

import fnmatch
import io
import os
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollyard.schemas.errors import SandboxError


class _Bounded(io.BytesIO):
    def __init__(self, max_bytes: int, what: str) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._what = what

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self._max_bytes:
            raise SandboxError(f"{self._what} has over {self._max_bytes} bytes", hint="leave parts out, or allow more")
        return super().write(data)


def pack(path: Path, name: str, *, max_bytes: int, exclude: Sequence[str] = ()) -> bytes:
    """What is at `path` as a plain tar archive; names start at `name`. Sockets are left out.

    Raises SandboxError when there is none, or the archive has over `max_bytes`.
    """
    if not os.path.lexists(path):
        raise SandboxError(f"there is no {str(path)!r} in the sandbox")
    buffer = _Bounded(max_bytes, repr(str(path)))
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, dereference=False) as archive:
            _add(archive, str(path), name, exclude)
    except OSError as error:
        raise SandboxError(f"{str(path)!r} cannot be packed: {error}") from error
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, path: str, name: str, exclude: Sequence[str]) -> None:
    if excluded(name, exclude):
        return
    try:
        member = archive.gettarinfo(path, name)
    except FileNotFoundError:  # it went away meanwhile
        return
    if member is None:
        return
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if not member.isreg():
        archive.addfile(member)
        if member.isdir():
            for entry in sorted(os.listdir(path)):  # noqa: PTH208 - names
                _add(archive, f"{path}/{entry}", f"{name}/{entry}", exclude)
        return
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as source:
            # What it has now: it may be growing.
            member.size = os.fstat(file).st_size
            archive.addfile(member, _Exactly(source, member.size))


class _Exactly(io.RawIOBase):
    """A file as if it had `size` bytes, whatever it has by now."""

    def __init__(self, source: io.BufferedReader, size: int) -> None:
        super().__init__()
        self._source = source
        self._left = size

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._source.read(wanted)
        data += bytes(wanted - len(data))
        self._left -= wanted
        return data


def without(archive: bytes, patterns: Sequence[str]) -> bytes:
    """A plain tar archive without the members that a pattern fits, and what is below them. Raises SandboxError."""
    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as target,
        ):
            for member in source:
                parts = member.name.split("/")
                if not any(excluded("/".join(parts[:count]), patterns) for count in range(1, len(parts) + 1)):
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, OSError) as error:
        raise SandboxError(f"what the sandbox packed is no archive: {error}") from error
    return buffer.getvalue()


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a tar pattern fits a name from any of its parts on, as `tar --exclude` does."""
    parts = name.split("/")
    tails = ["/".join(parts[start:]) for start in range(len(parts))]
    return any(fnmatch.fnmatchcase(tail, pattern.rstrip("/")) for pattern in patterns for tail in tails)
