"""The sink's folder: which part of the sample stream stands in which files. The files are the sink's own offset.

Contract: docs/architecture.md section 5.9. A cut is a span of SAMPLES, first to last, for all runs. Its files are
written aside, then a marker appears whole and once under its final name, and only then do the files move to where
readers look: a glob never sees a row that no cut owns, and two sinks cannot own one cut.

    <folder>/run=<run>/part-<first>-<last>.parquet            samples
    <folder>/rollouts/run=<run>/part-<first>-<last>.parquet   one row a delivery
    <folder>/_cuts/<first>.json                               the markers
    <folder>/_tmp/<first>-<nonce>/                            files that no reader sees yet
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta, Struct

from rollyard.pipeline.blobs import sync_folder
from rollyard.schemas import subjects
from rollyard.schemas.errors import SetupError
from rollyard.stages.arrow import Received, rollouts_table, samples_table

CUT_VERSION: Final = 1
ROW_GROUP_ROWS: Final = 4096


class CutFile(Struct, frozen=True, kw_only=True):
    """One Parquet file of a cut. Paths are relative to the folder."""

    table: Annotated[str, Meta(description="samples or rollouts")]
    run: str
    temporary: str
    final: str
    rows: int


class Cut(Struct, frozen=True, kw_only=True):
    """A marker: this span of the stream stands in these files."""

    stream_created: Annotated[str, Meta(description="creation time of SAMPLES, as the server says it")]
    first: Annotated[int, Meta(description="SAMPLES sequence with which the cut begins")]
    last: Annotated[int, Meta(description="SAMPLES sequence with which it ends")]
    deliveries: Annotated[int, Meta(description="deliveries in it; the other messages announce groups")]
    samples: Annotated[int, Meta(description="samples of those deliveries")]
    temporary: Annotated[str, Meta(description="folder in which its files were written")]
    files: tuple[CutFile, ...]
    gap: Annotated[bool, Meta(description="the stream did not hold this span any more")] = False
    version: int = CUT_VERSION


class Cuts:
    """The cuts in a folder. All methods block. OSErrors become SetupError."""

    def __init__(self, folder: Path, stream_created: str, checkpoint: Callable[[str], None]) -> None:
        self.folder = folder
        self._created = stream_created
        self._checkpoint = checkpoint
        self._markers = folder / "_cuts"
        self._aside = folder / "_tmp"

    def open(self) -> int:
        """Finish the renames that markers owe; returns the sequence after the last cut.

        Raises SetupError when the files belong to another stream than the one that is there now.
        """
        try:
            self._markers.mkdir(parents=True, exist_ok=True)
            self._aside.mkdir(exist_ok=True)
            firsts = [int(path.stem) for path in self._markers.glob("*.json") if path.stem.isdigit()]
            for leftover in sorted(self._aside.iterdir()):
                self._settle(leftover)
        except OSError as error:
            raise self._refused(error) from error
        if not firsts:
            return 1
        newest = self.at(max(firsts))
        assert newest is not None
        if newest.stream_created != self._created:
            raise SetupError(
                f"the files in {self.folder} are of a sample stream made {newest.stream_created}, "
                f"the one on the bus was made {self._created}",
                hint="give the sink another folder with [store] samples, or bring back the store of that stream",
            )
        return newest.last + 1

    def _settle(self, leftover: Path) -> None:
        """Deal with a folder that a dead sink left: its marker's files move on, the files of a lost race go."""
        first = leftover.name.partition("-")[0]
        cut = self.at(int(first)) if first.isdigit() else None
        if cut is not None and cut.temporary == str(leftover.relative_to(self.folder)):
            self._finish(cut)
        elif cut is not None:
            shutil.rmtree(leftover, ignore_errors=True)

    def at(self, first: int) -> Cut | None:
        """The cut that begins at a sequence, or None. Raises SetupError for a marker of a newer version."""
        path = self._markers / f"{first}.json"
        try:
            cut = msgspec.json.decode(path.read_bytes(), type=Cut)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise SetupError(f"{path} cannot be read: {error}", hint="restore it from a backup") from error
        if cut.version > CUT_VERSION:
            raise SetupError(f"{path} has version {cut.version}, this release reads {CUT_VERSION}", hint="upgrade")
        return cut

    def after(self, seq: int) -> int:
        """Where the cuts that stand from `seq` on end, plus one; `seq` itself if none begins there."""
        while (cut := self.at(seq)) is not None:
            seq = cut.last + 1
        return seq

    def write(self, first: int, last: int, received: list[Received], *, gap: bool = False) -> Cut:
        """Make the cut first..last of these deliveries. Returns the one that stands: ours, or that of a faster sink."""
        aside = self._aside / f"{first}-{secrets.token_hex(6)}"
        try:
            cut = self._claim(aside, first, last, received, gap)
            self._finish(cut)
            for leftover in self._aside.glob(f"{first}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError as error:
            raise self._refused(error) from error
        self._checkpoint("sink.cleaned")
        return cut

    def _claim(self, aside: Path, first: int, last: int, received: list[Received], gap: bool) -> Cut:
        """Write files and marker, and give the marker its name; returns the cut that bears it."""
        try:
            cut = self._prepare(aside, first, last, received, gap)
            os.link(aside / "cut.json", self._markers / f"{first}.json")
        except (FileExistsError, FileNotFoundError):
            # Another sink owns this cut; it may have swept our files away before we came to claim it.
            standing = self.at(first)
            if standing is None or standing.temporary != str(aside.relative_to(self.folder)):
                shutil.rmtree(aside, ignore_errors=True)
            if standing is None:
                raise
            cut = standing
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(self._markers)
        self._checkpoint("sink.marked")
        return cut

    def _prepare(self, aside: Path, first: int, last: int, received: list[Received], gap: bool) -> Cut:
        aside.mkdir()
        files: list[CutFile] = []
        for run in dict.fromkeys(each.delivery.run for each in received):
            rows = [each for each in received if each.delivery.run == run]
            for table, content in (("samples", samples_table(rows)), ("rollouts", rollouts_table(rows))):
                if content.num_rows:
                    files.append(self._write_file(aside, table, run, content, f"part-{first}-{last}.parquet"))
        cut = Cut(
            stream_created=self._created,
            first=first,
            last=last,
            deliveries=len(received),
            samples=sum(len(each.delivery.samples) for each in received),
            temporary=str(aside.relative_to(self.folder)),
            files=tuple(files),
            gap=gap,
        )
        marker = aside / "cut.json"
        with marker.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(cut)))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(aside)
        sync_folder(self._aside)
        self._checkpoint("sink.marker_written")
        return cut

    def _write_file(self, aside: Path, table: str, run: str, content: pa.Table, name: str) -> CutFile:
        token = subjects.token(run)
        path = aside / f"{table}-{token}.parquet"
        with path.open("xb") as file:
            pq.write_table(content, file, compression="zstd", row_group_size=ROW_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())
        self._checkpoint("sink.written")
        place = Path(f"run={token}") if table == "samples" else Path("rollouts", f"run={token}")
        return CutFile(
            table=table,
            run=run,
            temporary=str(path.relative_to(self.folder)),
            final=str(place / name),
            rows=content.num_rows,
        )

    def _finish(self, cut: Cut) -> None:
        """Move the files of a cut to where readers look. Anybody may do it, also several at a time."""
        for file in cut.files:
            final = self.folder / file.final
            if not final.parent.exists():
                final.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(final.parent.parent)
                sync_folder(self.folder)
            try:
                (self.folder / file.temporary).rename(final)
            except FileNotFoundError:
                if not final.exists():
                    raise
            sync_folder(final.parent)
            self._checkpoint("sink.renamed")
        shutil.rmtree(self.folder / cut.temporary, ignore_errors=True)

    def _refused(self, error: OSError) -> SetupError:
        return SetupError(
            f"cannot write samples under {self.folder}: {error.strerror or error}",
            hint="make room there, or set [store] samples to a local folder whose file system has hard links",
        )
