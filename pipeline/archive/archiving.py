"""Archiving a run: write, verify, purge, each on top of the one before. What `rollyard archive` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

from rollyard.pipeline.archive.check import Check
from rollyard.pipeline.archive.folder import Manifest, RunArchive
from rollyard.pipeline.archive.purge import check_closed, check_complete, purge
from rollyard.pipeline.archive.writer import ArchiveWriter
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.follow import CaughtUp, follow
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.sweep import GRACE_S, Sweep, Swept
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError
from rollyard.schemas.fleet import Run

Tell = Callable[[str], None]
_SIZE: Final = "Nats-Msg-Size"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with a run. `purge` verifies too; `samples` is the sink's folder, whose files name images."""

    samples: Path
    verify: bool = False
    purge: bool = False
    blob_grace_s: float = GRACE_S


class ArchiveReport(Struct, frozen=True, kw_only=True):
    """What was done, or would be."""

    run: str
    folder: Annotated[str, Meta(description="where the archive of the run is")]
    dry_run: bool = False
    new_events: Annotated[int, Meta(description="events that the archive lacked")] = 0
    new_bytes: Annotated[int, Meta(description="their size as they are logged")] = 0
    events: Annotated[int, Meta(description="events in the archive")] = 0
    files: Annotated[int, Meta(description="files of events in the archive")] = 0
    file_bytes: Annotated[int, Meta(description="their size")] = 0
    archived_seq: Annotated[int, Meta(description="LOG sequence of the last event in the archive; 0: none")] = 0
    verified_seq: Annotated[int, Meta(description="up to where archive and log were compared; 0: not at all")] = 0
    blocked: Annotated[str, Meta(description="in a dry run: why the run cannot be purged; empty: it can")] = ""
    purged_events: Annotated[int, Meta(description="events removed from the log")] = 0
    removed_blobs: Annotated[int, Meta(description="blobs removed, of this run and others: nothing named them")] = 0
    removed_blob_bytes: Annotated[int, Meta(description="their size")] = 0


async def archive_run(bus: Bus, run: str, folder: Path, plan: Plan, tell: Tell = lambda line: None) -> ArchiveReport:
    """Write what is new of a run to its archive, then verify and purge as the plan says. Safe to repeat.

    Raises ArchiveError when archive and log differ or the run may not be purged yet, BusError, BlobError, SetupError.
    """
    archive = RunArchive(folder, await _name(bus, run))
    if plan.purge:
        await check_closed(bus, archive.run)
    with archive.locked():
        written = [0, 0]

        def wrote(events: int, size: int) -> None:
            written[:] = events, size
            tell(f"archiving: {events:,} events, {size / 1e6:,.0f} MB")

        manifest = await ArchiveWriter(bus, archive, progress=wrote).run()
        purged, swept = 0, Swept()
        if plan.verify or plan.purge:
            check = Check(bus, archive, progress=lambda n, size: tell(f"verifying: {n:,} events, {size / 1e6:,.0f} MB"))
            manifest = await check.run(manifest)
        if plan.purge:
            # Once more: what was admitted since has logged nothing that was verified, unless it shows here.
            check_complete(check, await check_closed(bus, archive.run))
            purged = await purge(bus, archive, manifest, progress=tell)
            swept = await Sweep(bus, plan.samples, grace_s=plan.blob_grace_s, progress=tell).run()
    return _report(archive, manifest, written, purged, swept)


async def preview(bus: Bus, run: str, folder: Path, plan: Plan, tell: Tell = lambda line: None) -> ArchiveReport:
    """What `archive_run` would do; changes nothing."""
    archive = RunArchive(folder, await _name(bus, run))
    manifest = archive.manifest() or Manifest(run=archive.run, stream_created="")
    last = max((file.last for file in manifest.files), default=0)
    subject = subjects.log_subject(archive.run, "*", "*")
    new = [0, 0]
    async for item in follow(bus, subjects.LOG, subject, start_seq=last + 1, headers_only=True):
        if isinstance(item, CaughtUp):
            break
        new = [new[0] + 1, new[1] + int(item.headers.get(_SIZE, "0"))]
    if not plan.purge:
        return _report(archive, manifest, new, 0, Swept(), dry_run=True)
    blocked = ""
    try:
        await check_closed(bus, archive.run)
    except ArchiveError as error:
        blocked = error.message
    purged = sum((await bus.subjects(subjects.LOG, subject)).values())
    own = f"log.{subjects.token(archive.run)}."

    def goes(stored: Stored) -> bool:
        return stored.subject.startswith(own)

    sweep = Sweep(bus, plan.samples, without=goes, grace_s=plan.blob_grace_s, progress=tell)
    return _report(archive, manifest, new, purged, await sweep.run(dry_run=True), dry_run=True, blocked=blocked)


async def _name(bus: Bus, run: str) -> str:
    """The run's name, where its token was given too."""
    try:
        found = await Bucket[Run](bus, subjects.RUNS, Run).get(subjects.token(run))
    except ValueError:
        return run
    return found[0].run if found else run


def _report(
    archive: RunArchive,
    manifest: Manifest,
    new: list[int],
    purged: int,
    swept: Swept,
    *,
    dry_run: bool = False,
    blocked: str = "",
) -> ArchiveReport:
    return ArchiveReport(
        run=archive.run,
        folder=str(archive.path),
        dry_run=dry_run,
        new_events=new[0],
        new_bytes=new[1],
        events=sum(file.rows for file in manifest.files),
        files=len(manifest.files),
        file_bytes=sum(file.bytes for file in manifest.files),
        archived_seq=max((file.last for file in manifest.files), default=0),
        verified_seq=manifest.verified_seq,
        blocked=blocked,
        purged_events=purged,
        removed_blobs=swept.blobs,
        removed_blob_bytes=swept.bytes,
    )
