"""Writing the log of a run to its archive: what is new since the last file, in the order of the log.

Contract: docs/architecture.md section 5.13. A file is written aside and fsynced, with the blobs that its events name
before it, and then renamed: kill it at any moment and start it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import structs

from rollyard.pipeline.archive.folder import EventsFile, Manifest, RunArchive
from rollyard.pipeline.archive.rows import events_batch
from rollyard.pipeline.archive.schema import EVENTS_SCHEMA, FEW_VALUES
from rollyard.pipeline.blob_references import References
from rollyard.pipeline.blobs import sync_folder
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas import subjects
from rollyard.schemas.errors import RollyardError

FILE_BYTES: Final = 256_000_000
GROUP_BYTES: Final = 8_000_000
GROUP_ROWS: Final = 8192

Progress = Callable[[int, int], None]
"""Called with events and bytes so far."""


class ArchiveWriter:
    """Writes to one archive, which must be locked."""

    def __init__(
        self,
        bus: Bus,
        archive: RunArchive,
        *,
        file_bytes: int = FILE_BYTES,
        group_bytes: int = GROUP_BYTES,
        progress: Progress = lambda events, size: None,
    ) -> None:
        self._bus = bus
        self._archive = archive
        self._file_bytes = file_bytes
        self._group_bytes = group_bytes
        self._progress = progress
        self._references = References(bus.blobs)
        self._contents = Contents(bus.blobs)
        self._copied: set[str] = set()
        self._file: _Growing | None = None

    async def run(self) -> Manifest:
        """Write what the log holds now and the archive lacks; returns the manifest, which names every file.

        Raises BusError, SetupError when the disk refuses, ArchiveError for an archive of another log, BlobError for an
        event whose blobs are gone, TooNew.
        """
        try:
            return await self._run()
        finally:
            if self._file is not None:
                self._file.abandon()

    async def _run(self) -> Manifest:
        log = await self._bus.stream_info(subjects.LOG)
        manifest = await asyncio.to_thread(self._archive.open, str(log["created"]))
        start = max((file.last for file in manifest.files), default=0) + 1
        events = size = 0
        held: list[Stored] = []
        held_bytes = 0
        subject = subjects.log_subject(self._archive.run, "*", "*")
        async for stored in self._bus.read(
            subjects.LOG, subject, start_seq=start, until_seq=int(log["state"]["last_seq"])
        ):
            held.append(stored)
            held_bytes += len(stored.data)
            if held_bytes >= self._group_bytes or len(held) >= GROUP_ROWS:
                manifest = await asyncio.to_thread(self._add, manifest, held)
                events, size = events + len(held), size + held_bytes
                self._progress(events, size)
                held, held_bytes = [], 0
        manifest = await asyncio.to_thread(self._add, manifest, held, last=True)
        self._progress(events + len(held), size + held_bytes)
        return manifest

    def _add(self, manifest: Manifest, events: list[Stored], *, last: bool = False) -> Manifest:
        """Add events to the file that grows; finish it when it is large enough or the last one."""
        try:
            if events:
                self._copy_blobs(events)
                self._file = self._file or _Growing(self._archive.aside)
                self._file.add(events, self._archive.run, self._contents)
                checkpoint("archive.group_written")
            if self._file is not None and (last or self._file.bytes >= self._file_bytes):
                done = self._file.finish(self._archive.path)
                self._file = None
                manifest = structs.replace(manifest, files=(*manifest.files, done))
        except OSError as error:
            if isinstance(error, RollyardError):
                raise
            raise self._archive.refused(error) from error
        if last or self._file is None:
            self._archive.write_manifest(manifest)
            checkpoint("archive.manifest_written")
        return manifest

    def _copy_blobs(self, events: list[Stored]) -> None:
        blobs = self._bus.blobs
        for stored in events:
            named = self._references.of(stored)
            if blobs is None:
                continue
            for name in (named.parts | named.images) - self._copied:
                # A part must be there: the event cannot be read without it. An image may be mere text.
                if name in named.parts or name in blobs:
                    self._archive.blobs.put(blobs.get(name))
                self._copied.add(name)


class _Growing:
    """A file of events that is being written, and its digest."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"events-{secrets.token_hex(8)}"
        self._sink = _Digesting(self._path.open("xb"))
        options: dict[str, Any] = {"use_dictionary": FEW_VALUES, "write_page_checksum": True}
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"), EVENTS_SCHEMA, compression="zstd", **options
        )
        self._first = self._last = self._rows = 0
        self.bytes = 0

    def add(self, events: list[Stored], run: str, contents: Contents) -> None:
        """Write a group of rows."""
        self._first = self._first or events[0].seq
        self._last = events[-1].seq
        self._rows += len(events)
        self.bytes += sum(len(stored.data) for stored in events)
        self._writer.write_batch(events_batch(events, run, contents), row_group_size=len(events))

    def finish(self, folder: Path) -> EventsFile:
        """Close it and give it its name in `folder`."""
        self._writer.close()
        self._sink.sync()
        checkpoint("archive.file_written")
        final = folder / f"events-{self._first}-{self._last}.parquet"
        self._path.rename(final)
        sync_folder(folder)
        checkpoint("archive.renamed")
        return EventsFile(
            name=final.name,
            first=self._first,
            last=self._last,
            rows=self._rows,
            bytes=self._sink.size,
            sha256=self._sink.digest.hexdigest(),
        )

    def abandon(self) -> None:
        """Give it up; the next writer removes it."""
        self._sink.abandon()


class _Digesting(io.RawIOBase):
    """A file that remembers the digest of what it was given, whatever the disk makes of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        self.digest.update(data)
        written = self._file.write(data)
        self.size += written
        return written

    def sync(self) -> None:
        """Bring it to the disk, and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close it as it is."""
        self._file.close()
