"""The archive of one run: its events as Parquet files, the blobs that they need, and a manifest that vouches for them.

    <folder>/run=<run>/events-<first>-<last>.parquet   events in log order, by the LOG sequences of its first and last
    <folder>/run=<run>/blobs/                          what events name beside their bodies, as in the blob store
    <folder>/run=<run>/manifest.json                   digest of each file, and up to where all was verified
    <folder>/run=<run>/_tmp/, _lock                    files that are not finished; who writes here now

A file appears whole under its final name and never changes. Which files there are is what the folder says; a file that
the manifest lacks is one whose writer died right then.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta, Struct, structs

from rollyard.pipeline.blobs import BlobStore, sync_folder
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError, ConfigError, SetupError

MANIFEST_VERSION: Final = 1
_NAME: Final = re.compile(r"events-(\d+)-(\d+)\.parquet\Z")


class EventsFile(Struct, frozen=True, kw_only=True):
    """One file, as it was written."""

    name: str
    first: Annotated[int, Meta(description="LOG sequence of its first event")]
    last: Annotated[int, Meta(description="LOG sequence of its last event")]
    rows: int
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """What an archive holds."""

    run: Annotated[str, Meta(description="the run's name")]
    stream_created: Annotated[str, Meta(description="creation time of LOG, as the server says it")]
    files: tuple[EventsFile, ...] = ()
    verified_seq: Annotated[int, Meta(description="every event up to here was compared with the log; 0: none")] = 0
    verified_ms: Annotated[int, Meta(description="when that was, Unix ms")] = 0
    purged_seq: Annotated[int, Meta(description="the log may lack events up to here; 0: nothing was purged")] = 0
    version: int = MANIFEST_VERSION


class RunArchive:
    """The folder of one run in the archive `folder`. All methods block. Raises ConfigError for a name that is none."""

    def __init__(self, folder: Path, run: str) -> None:
        try:
            self.path = folder / f"run={subjects.token(run)}"
        except ValueError as error:
            raise ConfigError(f"the run's name: {error}", hint="give the name that you submitted under") from error
        self.run = run
        self.blobs = BlobStore(self.path / "blobs")
        self.aside = self.path / "_tmp"
        self._manifest = self.path / "manifest.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one who writes here; makes the folder. Raises SetupError."""
        try:
            self.aside.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
            lock = (self.path / "_lock").open("a")
        except OSError as error:
            raise self.refused(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SetupError(f"{self.path} is being written by another process", hint="wait for it") from error
            except OSError as error:
                raise self.refused(error) from error
            yield

    def open(self, stream_created: str) -> Manifest:
        """The manifest, with an entry for every file; removes what a dead writer left. Only while locked.

        Raises ArchiveError when it belongs to another log or has lost a file, SetupError when the disk refuses.
        """
        manifest = self.manifest() or Manifest(run=self.run, stream_created=stream_created)
        if manifest.stream_created != stream_created:
            raise ArchiveError(
                f"{self.path} is of a log made {manifest.stream_created}, the one on the bus was made {stream_created}",
                hint="archive to another folder with --to, or bring back the store of that log",
            )
        known = {file.name: file for file in manifest.files}
        found = self.files()
        if lost := sorted(known.keys() - {path.name for path in found}):
            raise ArchiveError(f"{self.path / lost[0]} is gone", hint="restore it from a backup")
        try:
            for leftover in self.aside.iterdir():
                leftover.unlink()
            files = tuple(known.get(path.name) or describe(path) for path in found)
        except OSError as error:
            raise self.refused(error) from error
        return structs.replace(manifest, files=files)

    def manifest(self) -> Manifest | None:
        """What stands there, or None. Raises ArchiveError for one that cannot be read or is of a newer release."""
        try:
            manifest = msgspec.json.decode(self._manifest.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ArchiveError(f"{self._manifest} cannot be read: {error}", hint="restore it from a backup") from error
        if manifest.version > MANIFEST_VERSION:
            raise ArchiveError(
                f"{self._manifest} has version {manifest.version}, this release reads {MANIFEST_VERSION}",
                hint="upgrade Rollyard on this machine",
            )
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, whole. Raises SetupError."""
        aside = self.aside / f"manifest-{secrets.token_hex(6)}"
        try:
            with aside.open("xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(manifest)))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._manifest)
            sync_folder(self.path)
        except OSError as error:
            raise self.refused(error) from error

    def files(self) -> list[Path]:
        """The files of events, in the order of the log. Raises ArchiveError when two hold the same part of it."""
        found = sorted((*span(path), path) for path in self.path.glob("events-*.parquet") if _NAME.match(path.name))
        for (_, last, earlier), (first, _, later) in pairwise(found):
            if first <= last:
                raise ArchiveError(
                    f"{earlier.name} and {later.name} in {self.path} hold the same events",
                    hint="was an archive copied into another one? remove the copy",
                )
        return [path for _, _, path in found]

    def refused(self, error: OSError) -> SetupError:
        """What a disk that refuses means."""
        return SetupError(
            f"cannot write the archive {self.path}: {error.strerror or error}",
            hint="make room there, or choose another folder with --to or [store] archive",
        )


def span(path: Path) -> tuple[int, int]:
    """First and last LOG sequence in a file, by its name."""
    named = _NAME.match(path.name)
    assert named is not None
    return int(named[1]), int(named[2])


def describe(path: Path) -> EventsFile:
    """The entry of a file, from what the disk holds. Raises OSError, or ArchiveError for a file that is not Parquet."""
    try:
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise ArchiveError(f"{path} cannot be read: {error}", hint="restore it from a backup") from error
    first, last = span(path)
    return EventsFile(
        name=path.name, first=first, last=last, rows=rows, bytes=path.stat().st_size, sha256=file_digest(path)
    )


def file_digest(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
