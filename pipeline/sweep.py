"""Removing blobs that nothing refers to any more.

A blob is put before its name is published, and put again whenever it is named anew (`BlobStore.put`), so one that was
not put for an hour is named by what stands on the bus now, or by nothing. What is looked through: every stream and
bucket, and the sink's Parquet files, whose messages name images. What cannot be read ends the sweep before it removes.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from rollyard.pipeline.blob_references import References, images_in
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import BLOB_HEADER, Bus
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.datasets import SAMPLES_GLOB
from rollyard.pipeline.jetstream import Stored, parse_headers
from rollyard.pipeline.streams import Limits, stream_configs
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError, BlobError, BusError, RollyardError

GRACE_S: Final = 3600.0
PROGRESS_EVERY: Final = 10_000
_NOT_FOUND: Final = ("(10037)", "(10059)")

Spared = Callable[[Stored], bool]


class Swept(Struct, frozen=True, kw_only=True):
    """What a sweep removed, or would remove."""

    blobs: int = 0
    bytes: int = 0


class Sweep:
    """One sweep over the blobs of a bus. `without` says of a message of the LOG that it is to be purged."""

    def __init__(
        self,
        bus: Bus,
        samples: Path,
        *,
        without: Spared = lambda stored: False,
        grace_s: float = GRACE_S,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._bus = bus
        self._samples = samples
        self._without = without
        self._grace_s = grace_s
        self._progress = progress
        self._references = References(bus.blobs)

    async def run(self, *, dry_run: bool = False) -> Swept:
        """Remove every blob that is old enough and that nothing names. Raises BusError, BlobError, ArchiveError."""
        store = self._bus.blobs
        if store is None:
            return Swept()
        try:
            limit_ns = await asyncio.to_thread(store.now_ns) - int(self._grace_s * 1e9)
            if not dry_run:
                await asyncio.to_thread(store.tidy, limit_ns)
            old = dict(await asyncio.to_thread(lambda: list(store.before(limit_ns))))
            await self._keep_what_is_named(old)
            if not dry_run:
                old = await asyncio.to_thread(_remove, store, old, limit_ns)
        except RollyardError:
            raise
        except OSError as error:
            raise BlobError(
                f"cannot remove blobs under {store.folder}: {error.strerror}", hint="who may write there?"
            ) from error
        return Swept(blobs=len(old), bytes=sum(old.values()))

    async def _keep_what_is_named(self, old: dict[str, int]) -> None:
        """Take out of `old` what something refers to. Only what is left in it matters, so it ends early."""
        for config in stream_configs(Limits()):
            name, seen = config["name"], 0
            read = self._work_queue(name) if config["retention"] == "workqueue" else self._kept(name)
            async with aclosing(read):
                async for stored in read:
                    if not old:
                        return
                    self._keep(stored, old)
                    seen += 1
                    if seen % PROGRESS_EVERY == 0:
                        self._progress(f"blobs in use: {seen:,} messages of {name} read, {len(old):,} blobs not found")
        if old:
            for image in await asyncio.to_thread(_images_of_samples, self._samples):
                old.pop(image, None)

    def _keep(self, stored: Stored, old: dict[str, int]) -> None:
        if stored.stream == subjects.LOG and self._without(stored):
            return
        named = self._references.of(stored)
        for blob in named.parts | named.images | {stored.headers.get(BLOB_HEADER, "")}:
            old.pop(blob, None)

    async def _kept(self, stream: str) -> AsyncGenerator[Stored, None]:
        try:
            await self._bus.stream_info(stream)
        except BusError as error:
            if any(code in error.message for code in _NOT_FOUND):
                return
            raise
        async for stored in self._bus.read(stream, ">"):
            yield stored

    async def _work_queue(self, stream: str) -> AsyncGenerator[Stored, None]:
        """A work queue has no direct get, and a consumer would take from it: one message at a time."""
        seq = 1
        while True:
            try:
                found = await self._bus.api(f"STREAM.MSG.GET.{stream}", {"seq": seq, "next_by_subj": ">"})
            except BusError as error:
                if any(code in error.message for code in _NOT_FOUND):
                    return
                raise
            message = found["message"]
            headers = parse_headers(b64decode(message.get("hdrs", "")))
            data = b64decode(message.get("data", ""))
            yield Stored(stream, message["subject"], message["seq"], 0, data, headers)
            seq = message["seq"] + 1


def _remove(store: BlobStore, old: dict[str, int], limit_ns: int) -> dict[str, int]:
    removed: dict[str, int] = {}
    for name, size in old.items():
        if store.remove(name, limit_ns):
            removed[name] = size
        checkpoint("sweep.removed_one")
    return removed


def _images_of_samples(folder: Path) -> set[str]:
    """The images that the messages of samples refer to."""
    found: set[str] = set()
    for path in sorted(folder.glob(SAMPLES_GLOB)):
        try:
            with pq.ParquetFile(path) as file:
                if "messages" not in file.schema_arrow.names:
                    continue
                for batch in file.iter_batches(256, columns=["messages"]):
                    text = batch.column(0).buffers()[2]
                    found |= images_in(memoryview(text)) if text is not None else set()
        except (OSError, pa.ArrowException) as error:
            raise ArchiveError(
                f"the samples in {path} cannot be read: {error}",
                hint="no blob was removed, since they may refer to some; restore the file or move it away",
            ) from error
    return found
