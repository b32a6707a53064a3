"""Files of a local sandbox, seen from outside.

What an agent made there is read and replaced with care: it may have planted links.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from rollyard.schemas.errors import SandboxError
from rollyard.stages.images.unpacker import Unpacker

_GZIP: Final = b"\x1f\x8b"


def write_files(top: Path, files: Mapping[str, str | bytes]) -> None:
    """Write `files` below `top`. Raises SandboxError that names the path."""
    real_top = top.resolve()
    if not real_top.is_dir():
        raise SandboxError(f"the sandbox folder {top} is gone", hint="a new attempt makes another")
    for path, content in files.items():
        target = top / path
        try:
            if not target.parent.resolve().is_relative_to(real_top):
                raise SandboxError(f"the path {path!r} leaves the sandbox through a link")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise SandboxError(f"the file {path!r} cannot be written into the sandbox: {error}") from error


def unpack_inside(top: Path, folder: Path, archive: bytes | Path, max_bytes: int) -> None:
    """Unpack a tar archive, plain or gzip, in a folder below `top`, which is made if need be. Raises SandboxError."""
    real_top = top.resolve()
    if not real_top.is_dir():
        raise SandboxError(f"the sandbox folder {top} is gone", hint="a new attempt makes another")
    if not folder.resolve().is_relative_to(real_top):
        raise SandboxError(f"the folder {str(folder)!r} leaves the sandbox")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with archive.open("rb") if isinstance(archive, Path) else io.BytesIO(archive) as file:
            mode: Literal["r:gz", "r:"] = "r:gz" if file.read(2) == _GZIP else "r:"
            file.seek(0)
            with tarfile.open(fileobj=file, mode=mode) as tar:
                unpacker = Unpacker(root=folder.resolve(), max_bytes=max_bytes)
                unpacker.apply(tar)
                unpacker.finish()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SandboxError(f"the archive cannot be unpacked: {error}", hint="it must be tar, plain or gzip") from error


def read_inside(top: Path, path: Path, max_bytes: int) -> bytes | None:
    """The first `max_bytes` of a regular file below `top`; None: there is none. Raises SandboxError."""
    try:
        if not path.resolve().is_relative_to(top.resolve()):
            raise SandboxError(f"the path {str(path)!r} leaves the sandbox")
        # O_NONBLOCK, so that a named pipe does not hold us.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _read(file, max_bytes) if stat.S_ISREG(os.fstat(file).st_mode) else None
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SandboxError(f"the file {str(path)!r} cannot be read: {error}") from error


def _read(file: int, max_bytes: int) -> bytes:
    data = b""
    while len(data) < max_bytes and (chunk := os.read(file, max_bytes - len(data))):
        data += chunk
    return data


def tail(path: Path, max_bytes: int) -> bytes:
    """The last `max_bytes` of a file; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""


def remove_tree(folder: Path) -> None:
    """Remove a folder in which an agent may have locked things. Raises SandboxError."""
    for left in (2, 1, 0):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if not left:
                raise SandboxError(f"the sandbox {folder} cannot be removed: {error}") from error
            folder.chmod(0o700)
            for parent, _, _ in os.walk(folder):
                for entry in os.scandir(parent):
                    if entry.is_dir(follow_symlinks=False):
                        Path(entry.path).chmod(0o700)
