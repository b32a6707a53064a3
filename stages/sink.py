"""SINK: the sample stream to Parquet files. A reader in stream order whose files are its own offset.

Contract: docs/architecture.md section 5.9. It keeps nothing but its folder; kill it at any moment and start it again,
or start two: each delivery stands in the files exactly once.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from rollyard.pipeline import crash
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.config import Config
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, DecodeError, SetupError
from rollyard.schemas.sample import Delivery
from rollyard.stages.arrow import Received
from rollyard.stages.cuts import Cut, Cuts

log = structlog.get_logger(__name__)

POLL_S: Final = 0.25
RETRY_S: Final = 1.0


class Sink:
    """Reads SAMPLES and writes it, cut after cut, to `folder`.

    A cut is made when it holds `max_rows` deliveries or `max_bytes` encoded bytes, or when its first delivery has
    waited for `max_age_s`. `skip_gap` goes on where the stream begins, past deliveries that it does not hold any more.
    """

    def __init__(
        self,
        bus: Bus,
        folder: Path,
        *,
        max_rows: int = 2000,
        max_bytes: int = 64_000_000,
        max_age_s: float = 10.0,
        skip_gap: bool = False,
        checkpoint: Callable[[str], None] = crash.checkpoint,
    ) -> None:
        self.folder = folder
        self._bus = bus
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._skip_gap = skip_gap
        self._checkpoint = checkpoint
        self._cuts: Cuts | None = None
        self._created = ""
        self._flush_to = 0
        self._reset(1)

    def _reset(self, first: int) -> None:
        """Begin a cut at a sequence."""
        self._first = self._next = first
        self._held: list[Stored] = []
        self._held_bytes = 0
        self._since_s = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Write cuts until `stop` is set, then what is stored by then.

        Waits for a bus that is away. Raises SetupError for a gap in the stream, for files of another stream and for a
        disk that refuses, DecodeError for a delivery that cannot be read.
        """
        while True:
            stopping = stop.is_set()
            try:
                idle = await self._turn(flush=stopping)
            except BusError as error:
                if self._bus.closed.is_set():
                    raise
                log.warning("sink_waits_for_bus", error=str(error))
                if stopping:
                    return
                await _wait(stop, RETRY_S)
                continue
            if idle and stopping:
                return
            if idle:
                await _wait(stop, POLL_S)

    async def _turn(self, *, flush: bool) -> bool:
        """Read what is new and cut what is due. Returns whether there was nothing more to read or to cut."""
        info = await self._bus.stream_info(subjects.SAMPLES)
        cuts = await self._open(info)
        self._make_way(cuts)
        begins, last = int(info["state"]["first_seq"]), int(info["state"]["last_seq"])
        if flush:
            self._flush_to = last = min(last, self._flush_to or last)
        gap_ends = await self._collect(begins, last)
        due = bool(self._held) and (bool(gap_ends) or flush or self._is_full() or self._is_old())
        if due:
            await self._cut(cuts)
        elif gap_ends:
            await self._pass_gap(cuts, gap_ends)
        return not due and not gap_ends

    async def _open(self, info: dict[str, Any]) -> Cuts:
        created = str(info["created"])
        if self._cuts is None or created != self._created:
            cuts = Cuts(self.folder, created, self._checkpoint)
            self._reset(await asyncio.to_thread(cuts.open))
            self._cuts, self._created = cuts, created
            log.info("sink_started", folder=str(self.folder), next_seq=self._first)
        return self._cuts

    def _make_way(self, cuts: Cuts) -> None:
        """Go on after what another sink has cut meanwhile."""
        first = cuts.after(self._first)
        if first != self._first:
            log.info("sink_other_was_faster", next_seq=first)
            self._reset(first)

    async def _collect(self, begins: int, last: int) -> int:
        """Hold what the stream, which begins at `begins`, has up to `last`, at most a full cut of it.

        Returns the last sequence of a gap that begins at the next message, or 0.
        """
        if self._next > last or self._is_full():
            return 0
        if self._next < begins:
            return begins - 1
        async for stored in self._bus.read(subjects.SAMPLES, ">", start_seq=self._next, until_seq=last):
            if stored.seq != self._next:
                return stored.seq - 1
            self._next += 1
            if stored.subject.startswith("sample."):
                if not self._held:
                    self._since_s = time.monotonic()
                self._held.append(stored)
                self._held_bytes += len(stored.data)
            if self._is_full():
                break
        return 0

    def _is_full(self) -> bool:
        return len(self._held) >= self._max_rows or self._held_bytes >= self._max_bytes

    def _is_old(self) -> bool:
        return time.monotonic() - self._since_s >= self._max_age_s

    async def _cut(self, cuts: Cuts) -> None:
        first, last, held = self._first, self._next - 1, self._held
        self._checkpoint("sink.collected")
        cut = await asyncio.to_thread(lambda: cuts.write(first, last, [_received(stored) for stored in held]))
        self._done(cut)

    def _done(self, cut: Cut) -> None:
        log.info("cut", first=cut.first, last=cut.last, deliveries=cut.deliveries, samples=cut.samples)
        self._reset(cut.last + 1)

    async def _pass_gap(self, cuts: Cuts, gap_ends: int) -> None:
        gap_begins = self._next
        if not self._skip_gap:
            raise SetupError(
                f"SAMPLES does not hold {gap_begins} to {gap_ends} any more, and no file in {self.folder} does",
                hint="their samples are still in the log: `rollyard replay --run RUN --out DIR` writes those of a run; "
                "`rollyard sink --skip-gap` goes on after the gap",
            )
        log.error("sink_gap_skipped", first=gap_begins, last=gap_ends)
        first = self._first
        self._done(await asyncio.to_thread(lambda: cuts.write(first, gap_ends, [], gap=True)))


def _received(stored: Stored) -> Received:
    try:
        return Received(stored.seq, stored.time_ms, decode(stored.data, Delivery))
    except DecodeError as error:
        raise DecodeError(f"{stored.subject} at {stored.seq} of SAMPLES: {error.message}", hint=error.hint) from error


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await stop.wait()


async def run_sink(config: Config, *, skip_gap: bool = False) -> int:
    """Run a sink as a process: until SIGTERM or SIGINT. Returns the exit code."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Bus.connect(config.nats.url, name="sink", blobs=BlobStore(config.blobs_dir()), wait_s=60.0) as bus:
        sink = Sink(
            bus,
            config.samples_dir(),
            max_rows=config.sink.max_deliveries,
            max_bytes=config.sink.max_bytes,
            max_age_s=config.sink.max_wait_s,
            skip_gap=skip_gap,
        )
        await sink.run(stop)
    return 0
