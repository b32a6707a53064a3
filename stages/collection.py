"""What is kept of a rollout: the end of the agent's output, files that the task names, the diff of its work.

Everything is a blob by content, so that collecting it again after a worker's death changes nothing. What cannot be kept
is named in the result's metadata; it never fails an attempt.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rollyard.pipeline.blobs import BlobStore
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import Artifact
from rollyard.stages.changes import working_diff
from rollyard.stages.patterns import is_path, matches, search
from rollyard.stages.sandbox import Base, Sandbox

DIFF_NAME: Final = "changes.diff"
NOT_KEPT: Final = "not_kept"
FIND_S: Final = 60.0
MAX_FILES: Final = 256
MAX_FILE_BYTES: Final = 8 << 20
MAX_SUM_BYTES: Final = 64 << 20
MAX_LISTING_BYTES: Final = 4 << 20


@dataclass(slots=True)
class Collection:
    """Artifacts by name, of at most `max_bytes` together, and what could not be kept."""

    blobs: BlobStore | None
    max_bytes: int = MAX_SUM_BYTES
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    not_kept: list[str] = field(default_factory=list)

    def metadata(self) -> dict[str, Any]:
        """What the result's metadata says of it."""
        return {NOT_KEPT: self.not_kept[:MAX_FILES]} if self.not_kept else {}

    def left_bytes(self) -> int:
        """How much more it takes."""
        return self.max_bytes - sum(artifact.size_bytes for artifact in self.artifacts.values())

    async def add(self, name: str, data: bytes, *, truncated: bool = False) -> None:
        """Keep one file; a name again replaces it. Raises BlobRefused."""
        if self.blobs is None:
            self.not_kept.append(f"{name}: there is no blob store")
        elif len(data) > self.left_bytes():
            self.not_kept.append(f"{name}: over the {self.max_bytes:,} bytes that are kept of a rollout")
        else:
            blob = await asyncio.to_thread(self.blobs.put, data)
            self.artifacts[name] = Artifact(name=name, blob=blob, size_bytes=len(data), truncated=truncated)

    async def add_output(self, sandbox: Sandbox, name: str, max_bytes: int) -> None:
        """Keep the last `max_bytes` of a process's output and errors, where it wrote any."""
        if not max_bytes:
            return
        stdout, stderr = await sandbox.output(name, max_bytes + 1)
        for label, data in (("stdout.log", stdout), ("stderr.log", stderr)):
            if data:
                await self.add(label, data[-max_bytes:], truncated=len(data) > max_bytes)

    async def add_files(
        self,
        sandbox: Sandbox,
        patterns: Sequence[str],
        *,
        base: Base = "work",
        prefix: str = "",
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Keep the regular files below `base` that patterns name, links aside. Raises BlobRefused."""
        top = sandbox.workdir if base == "work" else sandbox.home
        for pattern in patterns:
            try:
                paths = await find_files(sandbox, top, pattern)
            except SandboxError as error:
                self.not_kept.append(f"{pattern}: {error.message}")
                continue
            if len(paths) > MAX_FILES:
                self.not_kept.append(f"{pattern}: {len(paths) - MAX_FILES} of {len(paths)} files")
            for path in paths[:MAX_FILES]:
                await self._add_file(sandbox, posixpath.join(top, path), prefix + path, max_file_bytes)

    async def _add_file(self, sandbox: Sandbox, path: str, name: str, max_bytes: int) -> None:
        limit = min(max_bytes, self.left_bytes())
        try:
            data = await sandbox.read_file(path, limit + 1) if limit > 0 else b""
        except SandboxError as error:
            self.not_kept.append(f"{name}: {error.message}")
            return
        if data is None:
            return
        if limit <= 0:
            self.not_kept.append(f"{name}: there is no room left for it")
            return
        await self.add(name, data[:limit], truncated=len(data) > limit)

    async def add_diff(self, sandbox: Sandbox) -> None:
        """Keep what has changed in the working directory, an empty diff too. Raises BlobRefused."""
        try:
            diff = await working_diff(sandbox)
        except SandboxError as error:
            self.not_kept.append(f"{DIFF_NAME}: {error.message}")
            return
        if diff is not None:
            await self.add(DIFF_NAME, diff)


async def find_files(sandbox: Sandbox, top: str, pattern: str) -> list[str]:
    """Regular files below `top` that a pattern names, sorted. Raises SandboxError.

    A pattern without wildcards is a file's name, whether there is one or not.
    """
    if is_path(pattern):
        return [posixpath.normpath(pattern)]
    folder, name = search(pattern)
    argv = ("find", posixpath.join(top, folder), "-type", "f", "-name", name)
    found = await sandbox.exec(argv, timeout_s=FIND_S, max_output_bytes=MAX_LISTING_BYTES)
    if found.exit_code == 127:
        raise SandboxError("there is no `find` in the sandbox")
    if found.timed_out or found.truncated:
        raise SandboxError("there are too many files to look through; write a narrower pattern")
    listed = found.stdout.decode(errors="surrogateescape").split("\n")
    paths = {posixpath.relpath(path, top) for path in listed if path}
    return sorted(path for path in paths if matches(pattern, path) and path.isprintable())
