"""Replay with the stitcher of this package: what `rollyard replay` runs."""

from __future__ import annotations

from collections.abc import Callable

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.replay import ReplayReport, replay
from rollyard.stages.stitching import samples_of


async def replay_run(bus: Bus, run: str, *, progress: Callable[[int, int], None] | None = None) -> ReplayReport:
    """Rebuild the samples of a run from its log and compare them with the commits. Raises BusError."""
    return await replay(bus, run, samples_of, progress=progress)
