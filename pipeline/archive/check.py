"""Verifying an archive: every file is read back and compared with the log, event by event, byte by byte.

An event that the log does not hold any more counts as verified where an earlier verification saw it, and its file is to
the letter what was written then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from msgspec import structs

from rollyard.pipeline.archive.folder import EventsFile, Manifest, RunArchive, file_digest
from rollyard.pipeline.archive.reader import groups
from rollyard.pipeline.blob_references import References
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError, BlobError

MOST_PROBLEMS: Final = 100


class Check:
    """One verification. `problems` is empty where archive and log agree."""

    def __init__(
        self,
        bus: Bus,
        archive: RunArchive,
        *,
        progress: Callable[[int, int], None] = lambda events, size: None,
    ) -> None:
        self.problems: list[str] = []
        self.rollouts: set[str] = set()
        self.committed: set[str] = set()
        self.compared = 0
        self._bus = bus
        self._archive = archive
        self._progress = progress
        self._references = References(archive.blobs)
        self._blobs: set[str] = set()
        self._log = _Ahead(_nothing())
        self._before = self._rows = self._bytes = 0

    async def run(self, manifest: Manifest) -> Manifest:
        """The manifest with everything in it verified, which is written down.

        Raises ArchiveError, which tells the first problem, unless archive and log agree; BusError, SetupError.
        """
        last = max((file.last for file in manifest.files), default=0)
        subject = subjects.log_subject(self._archive.run, "*", "*")
        self._log = _Ahead(self._bus.read(subjects.LOG, subject, until_seq=last))
        await self._log.step()
        for file in manifest.files:
            await self._file(file, manifest.verified_seq)
        while self._log.now is not None:
            await self._missing()
        await asyncio.to_thread(self._check_blobs)
        if self.problems:
            more = len(self.problems) - 1
            raise ArchiveError(
                self.problems[0] + (f"; and {more} more problems" if more else ""),
                hint=f"restore {self._archive.path} from a backup, with manifest.json, or archive elsewhere (--to) "
                "while the log holds the run; what is not in the log any more stands in this folder alone",
            )
        verified = structs.replace(manifest, verified_seq=last, verified_ms=time.time_ns() // 1_000_000)
        await asyncio.to_thread(self._archive.write_manifest, verified)
        return verified

    async def _file(self, file: EventsFile, verified_seq: int) -> None:
        path = self._archive.path / file.name
        intact = await asyncio.to_thread(self._intact, path, file)
        read, rows = groups(path), 0
        try:
            while group := await asyncio.to_thread(next, read, None):
                for stored in group:
                    await self._compare(stored, path, verified_seq if intact else 0)
                await asyncio.to_thread(self._look_at_blobs, group)
                rows += len(group)
                self._rows += len(group)
                self._bytes += sum(len(stored.data) for stored in group)
                self._progress(self._rows, self._bytes)
        except ArchiveError as error:
            self._problem(error.message)
            return
        if rows != file.rows:
            self._problem(f"{path} has {rows} rows, {file.rows} were written")

    def _intact(self, path: Path, file: EventsFile) -> bool:
        try:
            if file_digest(path) == file.sha256:
                return True
        except OSError as error:
            self._problem(f"{path} cannot be read: {error.strerror}")
            return False
        self._problem(f"{path} is not what was written: its digest differs")
        return False

    async def _compare(self, stored: Stored, path: Path, verified_seq: int) -> None:
        log = self._log
        if stored.seq <= self._before:
            self._problem(f"{path}: event {stored.seq} stands after {self._before}")
            return
        self._before = stored.seq
        while log.now is not None and log.now.seq < stored.seq:
            await self._missing()
        if log.now is None or log.now.seq > stored.seq:
            if stored.seq > verified_seq:
                self._problem(f"{path}: event {stored.seq} is not in the log")
        else:
            self._same(stored, log.now, path)
            self.compared += 1
            await log.step()
        _, _, rollout_id, kind = stored.subject.split(".")
        self.rollouts.add(rollout_id)
        if kind == "commit":
            self.committed.add(rollout_id)

    def _same(self, archived: Stored, logged: Stored, path: Path) -> None:
        for what, found, wanted in (
            ("payload", archived.data, logged.data),
            ("subject", archived.subject, logged.subject),
            ("time_ms", archived.time_ms, logged.time_ms),
        ):
            if found != wanted:
                self._problem(f"{path}: {what} of event {archived.seq} differs from the log")

    async def _missing(self) -> None:
        """The log has an event that the archive lacks."""
        lacking = self._log.now
        assert lacking is not None
        self._problem(f"event {lacking.seq} of the log, {lacking.subject}, is not in {self._archive.path}")
        await self._log.step()

    def _look_at_blobs(self, group: list[Stored]) -> None:
        """What the events name is in the archive; an image only where there is one, since it may be mere text."""
        store = self._bus.blobs
        for stored in group:
            try:
                named = self._references.of(stored)
            except BlobError as error:
                self._problem(f"event {stored.seq}: {error.message}")
                continue
            for name in (named.parts | named.images) - self._blobs:
                self._blobs.add(name)
                needed = name in named.parts or (store is not None and name in store)
                if needed and name not in self._archive.blobs:
                    self._problem(f"event {stored.seq}: blob {name} is not in {self._archive.path}")

    def _check_blobs(self) -> None:
        """Each blob of the archive is what its name says."""
        for name in self._archive.blobs.names():
            try:
                self._archive.blobs.get(name)
            except BlobError as error:
                self._problem(error.message)

    def _problem(self, text: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)


class _Ahead:
    """The log, with one event looked at ahead."""

    def __init__(self, events: AsyncIterator[Stored]) -> None:
        self._events = events
        self.now: Stored | None = None

    async def step(self) -> None:
        self.now = await anext(self._events, None)


async def _nothing() -> AsyncIterator[Stored]:
    return
    yield
