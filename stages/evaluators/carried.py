"""What of an agent's files goes into a fresh sandbox: files, folders and links, without privileges. Pure."""

from __future__ import annotations

import io
import tarfile
from typing import Final

_PERMISSIONS: Final = 0o777


def plain(archive: bytes) -> bytes:
    """The archive without named pipes, sockets and devices, and without set-user-id bits. Raises ValueError.

    It is the same object when there is nothing to change.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source:
            members = source.getmembers()
            if all(_is_plain(member) and member.mode <= _PERMISSIONS for member in members):
                return archive
            made = io.BytesIO()
            with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as target:
                for member in filter(_is_plain, members):
                    member.mode &= _PERMISSIONS
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
            return made.getvalue()
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"is no archive: {error}") from error


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() or member.isdir() or member.issym() or member.islnk()
