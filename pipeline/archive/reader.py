"""Reading an archive: its events as they were logged, one group of rows at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollyard.pipeline.archive.folder import RunArchive
from rollyard.pipeline.bus import BLOB_HEADER
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.log import RolloutLog, by_rollout
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError

_COLUMNS: Final = ("seq", "time_ms", "subject", "payload", "blob")


class ArchiveLog:
    """The runs in the archive `folder`, as a source of events; it needs no bus."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rollouts(self, run: str) -> AsyncIterator[RolloutLog]:
        """See `LogSource`. Raises ArchiveError when there is no such run or a file of it is damaged."""
        archive = RunArchive(self._folder, run)
        return by_rollout(_in_order(archive), Contents(archive.blobs))


async def _in_order(archive: RunArchive) -> AsyncIterator[Stored]:
    paths, manifest = archive.files(), archive.manifest()
    lacking = {file.name for file in manifest.files} - {path.name for path in paths} if manifest is not None else set()
    if lacking:
        raise ArchiveError(
            f"{archive.path} lacks {', '.join(sorted(lacking))}, which its manifest names",
            hint="restore it from a backup: without it the archive is not whole",
        )
    if not paths and manifest is None:
        raise ArchiveError(
            f"there is no archive of run {archive.run!r} at {archive.path}",
            hint="`rollyard archive --run RUN` makes it",
        )
    for path in paths:
        read = groups(path)
        while group := await asyncio.to_thread(next, read, None):
            for stored in group:
                yield stored


def groups(path: Path) -> Iterator[list[Stored]]:
    """The events of one file. Raises ArchiveError, also for a page whose checksum does not fit."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                yield _events(file.read_row_group(number, columns=list(_COLUMNS), use_threads=False))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ArchiveError(f"{path} cannot be read: {error}", hint="restore it from a backup") from error


def _events(table: pa.Table) -> list[Stored]:
    columns = [table.column(name).to_pylist() for name in _COLUMNS]
    return [
        Stored(subjects.LOG, subject, seq, time_ms, payload, {} if blob is None else {BLOB_HEADER: blob})
        for seq, time_ms, subject, payload, blob in zip(*columns, strict=True)
    ]
