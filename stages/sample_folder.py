"""A folder of samples in the layout of the sink, written once: by replay, not from the sample stream.

    <folder>/run=<run>/part-<first>-<last>.parquet            samples
    <folder>/rollouts/run=<run>/part-<first>-<last>.parquet   one row a rollout
    <folder>/replay.json                                      how they were made

It appears whole: everything is written beside it, under a name of its own, which becomes `folder` at the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow.parquet as pq

from rollyard.pipeline.blobs import sync_folder
from rollyard.schemas import packed, subjects
from rollyard.schemas.errors import SetupError
from rollyard.stages.arrow import Received, rollouts_table, samples_table
from rollyard.stages.cuts import ROW_GROUP_ROWS

NOTE: Final = "replay.json"
MAX_ROLLOUTS: Final = 2000
MAX_BYTES: Final = 64_000_000
_BYTES_A_TOKEN: Final = 13


class SampleFolder:
    """Takes rollouts of one run, in the order of their sequences, and writes a file of each few thousand.

    Make one with `with SampleFolder.new(folder) as made`; call `finish` at the end of the block. All methods block.
    """

    def __init__(self, folder: Path, aside: Path) -> None:
        self.folder = folder
        self._aside = aside
        self._held: list[Received] = []
        self._held_bytes = 0

    @classmethod
    @contextmanager
    def new(cls, folder: Path) -> Iterator[SampleFolder]:
        """A folder that is not there yet, or is empty. Without `finish` nothing is left of it. Raises SetupError."""
        folder = folder.absolute()
        aside = folder.with_name(f".{folder.name}-{secrets.token_hex(6)}")
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise SetupError(
                    f"{folder} holds something already", hint="give --out a new folder, or remove this one"
                )
            aside.mkdir(parents=True)
        except OSError as error:
            raise _refused(folder, error) from error
        try:
            yield cls(folder, aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def add(self, received: Received) -> None:
        """Write a rollout; `received.seq` and `.time_ms` are those of its commit. Raises SetupError."""
        self._held.append(received)
        self._held_bytes += sum(len(sample.token_ids) * _BYTES_A_TOKEN for sample in received.delivery.samples)
        if len(self._held) >= MAX_ROLLOUTS or self._held_bytes >= MAX_BYTES:
            self._flush()

    def finish(self, note: Any) -> None:
        """Write what is held, and `note` as JSON, and give the folder its name. Raises SetupError."""
        if self._held:
            self._flush()
        try:
            text = msgspec.json.format(msgspec.json.encode(note, enc_hook=packed.to_json))
            (self._aside / NOTE).write_bytes(text + b"\n")
            sync_folder(self._aside)
            self._aside.rename(self.folder)
            sync_folder(self.folder.parent)
        except OSError as error:
            raise _refused(self.folder, error) from error

    def _flush(self) -> None:
        rows, self._held, self._held_bytes = self._held, [], 0
        name = f"part-{rows[0].seq}-{rows[-1].seq}.parquet"
        run = f"run={subjects.token(rows[0].delivery.run)}"
        try:
            self._write(self._aside / run / name, samples_table(rows))
            self._write(self._aside / "rollouts" / run / name, rollouts_table(rows))
        except OSError as error:
            raise _refused(self.folder, error) from error

    def _write(self, path: Path, table: Any) -> None:
        if not table.num_rows:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            pq.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())


def _refused(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"cannot write samples to {folder}: {error.strerror or error}",
        hint="make room there, or give --out another folder",
    )
