"""Images from a task's Dockerfile, built once a content."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

from docker.utils.build import exclude_paths

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import ImageBuild
from rollyard.schemas.subjects import digest
from rollyard.stages.sandbox import check_path
from rollyard.stages.sandboxes.docker_engine import Engine, EngineGone
from rollyard.stages.sandboxes.docker_wire import Connection, EngineRefused

IMAGES: Final = "rollyard-build"
DOCKERFILE: Final = "Dockerfile.rollyard"
LAST_LINES: Final = 30
MAX_LINE_BYTES: Final = 2000


async def build_image(engine: Engine, build: ImageBuild, on_progress: Callable[[str], None]) -> str:
    """The name of an image of that content. Lines of the engine's output go to `on_progress`.

    Raises SandboxError with the last lines for a step that fails. Ends the build when it is cancelled.
    """
    context = await asyncio.to_thread(context_archive, build)
    args = json.dumps(dict(sorted(build.args.items())))
    name = f"{IMAGES}:{digest(args, digest(context, chars=64), chars=40)}"
    try:
        await engine.call(lambda client: client.inspect_image(name))
    except EngineGone:
        pass
    else:
        on_progress(f"{name} is there already")
        return name
    query = urlencode(
        {"t": name, "dockerfile": DOCKERFILE, "buildargs": args, "rm": "1", "forcerm": "1"}, quote_via=quote
    )
    lines: deque[str] = deque(maxlen=LAST_LINES)
    async with engine.wire.opened() as connection:
        try:
            await connection.send(f"/build?{query}", context, kind="application/x-tar")
            await connection.answer()
            async for line in _lines(connection):
                lines.append(line)
                on_progress(line)
        except EngineRefused as error:
            raise SandboxError(f"the image cannot be built: {error.said}", hint="see sandbox.build") from error
        except _StepFailed as error:
            raise SandboxError(
                "the image cannot be built: " + "\n".join([*lines, error.said]), hint="see sandbox.build"
            ) from error
    return name


class _StepFailed(Exception):
    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


async def _lines(connection: Connection) -> AsyncIterator[str]:
    """What the engine says, line by line. Raises _StepFailed."""
    rest = b""
    async for piece in connection.pieces():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if line.strip():
                for text in _said(line):
                    yield text[:MAX_LINE_BYTES]


def _said(line: bytes) -> list[str]:
    try:
        record = json.loads(line)
    except ValueError:
        return [line.decode(errors="replace")]
    if "error" in record:
        raise _StepFailed(str(record["error"]))
    text = record.get("stream") or record.get("status") or ""
    return [part for part in str(text).splitlines() if part.strip()]


def context_archive(build: ImageBuild) -> bytes:
    """The build context as a tar archive, the same for the same content. Raises SandboxError."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        given = {DOCKERFILE: build.dockerfile} | {check_path(path): text for path, text in build.files.items()}
        if build.context:
            _add_folder(tar, Path(build.context), skip=given.keys())
        for path, text in sorted(given.items()):
            data = text.encode()
            entry = _plain(tarfile.TarInfo(path))
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _add_folder(tar: tarfile.TarFile, folder: Path, skip: object) -> None:
    if not folder.is_dir():
        raise SandboxError(f"the build context {folder} is no folder of this machine", hint="see sandbox.build.context")
    try:
        ignore = folder / ".dockerignore"
        patterns = ignore.read_text().splitlines() if ignore.is_file() else []
        kept = exclude_paths(str(folder), [line.strip() for line in patterns if line.strip() and line[0] != "#"])
        for path in sorted(kept):
            if path not in skip:  # type: ignore[operator]
                tar.add(folder / path, arcname=path, recursive=False, filter=_plain)
    except OSError as error:
        raise SandboxError(f"the build context {folder} cannot be read: {error}") from error


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between copies of the same content."""
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry
