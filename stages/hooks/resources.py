"""Hook `resources`: what the sandbox used while the agent ran."""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import AgentResult
from rollyard.stages.hook import HookArgs, HookContext
from rollyard.stages.sandbox import Stats


class Resources(HookArgs, kw_only=True):
    """Adds the metrics cpu_s, and max_memory_bytes, max_processes and disk_bytes as far as the backend knows them.

    Peaks are those of the samples, one each `period_s`; stats_samples says of how many.
    """

    period_s: Annotated[float, Meta(ge=0.1, le=600, description="time between two samples")] = 5.0

    def __post_init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.samples = 0

    async def during_run(self, context: HookContext) -> None:
        """Take samples until the agent ends."""
        while context.sandbox is not None:
            await self._sample(context)
            await asyncio.sleep(self.period_s)

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Say what was seen, with a last sample."""
        await self._sample(context)
        for name, value in self.peaks.items():
            context.add_metric(name, value)
        context.add_metric("stats_samples", self.samples)

    async def _sample(self, context: HookContext) -> None:
        if context.sandbox is None:
            return
        try:
            now = await context.sandbox.stats()
        except SandboxError:
            return
        self.samples += 1
        for name, value in named(now).items():
            self.peaks[name] = max(value, self.peaks.get(name, value))


def named(stats: Stats) -> dict[str, float]:
    """The numbers that a backend knows, under the names of the metrics."""
    values = {
        "max_memory_bytes": stats.memory_bytes,
        "cpu_s": stats.cpu_s,
        "max_processes": stats.processes,
        "disk_bytes": stats.disk_bytes,
    }
    return {name: float(value) for name, value in values.items() if value is not None}
