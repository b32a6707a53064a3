"""Archives that whatever tar is inside packs and unpacks: looked through on this side."""

from __future__ import annotations

import fnmatch
import gzip
import io
import posixpath
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import MAX_TREE_BYTES


def checked_archive(archive: bytes | Path) -> bytes:
    """A tar archive, plain or gzip, as plain bytes. Raises SandboxError for a member that would leave the folder it is
    unpacked in: by its name, or through a link of the same archive."""
    try:
        data = archive.read_bytes() if isinstance(archive, Path) else archive
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MAX_TREE_BYTES + 1)
        if len(data) > MAX_TREE_BYTES:
            raise SandboxError(f"the archive has over {MAX_TREE_BYTES} bytes unpacked")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            _check(tar)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SandboxError(f"the archive cannot be read: {error}", hint="it must be tar, plain or gzip") from error
    return data


def without(archive: bytes, patterns: Sequence[str]) -> bytes:
    """A plain archive without the members that GNU tar's --exclude leaves out. Raises SandboxError."""
    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as kept,
        ):
            for member in tar:
                if not any(is_excluded(member.name, pattern) for pattern in patterns):
                    kept.addfile(member, tar.extractfile(member) if member.isreg() else None)
    except (OSError, tarfile.TarError) as error:
        raise SandboxError(f"the archive from the sandbox cannot be read: {error}") from error
    return buffer.getvalue()


def is_excluded(name: str, pattern: str) -> bool:
    """Whether `pattern` is the name, the end of it after a slash, or that of a folder above."""
    parts = name.removeprefix("./").split("/")
    pairs = ((start, end) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
    return any(fnmatch.fnmatchcase("/".join(parts[start:end]), pattern.rstrip("/")) for start, end in pairs)


def _check(tar: tarfile.TarFile) -> None:
    links: set[str] = set()
    for member in tar:
        name = posixpath.normpath(member.name)
        parents = _parents(name)
        if member.name.startswith("/") or name == ".." or name.startswith("../") or not links.isdisjoint(parents):
            raise SandboxError(f"the archive's member {member.name!r} leaves the folder that it is unpacked in")
        if member.islnk():
            source = posixpath.normpath(member.linkname)
            if source.startswith(("/", "../")) or source == ".." or not links.isdisjoint([source, *_parents(source)]):
                raise SandboxError(f"the archive's member {member.name!r} is a hard link to what is elsewhere")
        elif member.issym():
            links.add(name)
        elif not (member.isreg() or member.isdir()):
            raise SandboxError(f"the archive's member {member.name!r} is neither file, folder nor link")


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
