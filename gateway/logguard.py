"""Whether the log can take new calls: it is looked at every few seconds, so that ends always have room."""

from __future__ import annotations

import asyncio

import structlog

from rollyard.gateway.metrics import GatewayMetrics
from rollyard.gateway.refusal import unavailable
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.streams import fill
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError

log = structlog.get_logger(__name__)


class LogGuard:
    """Refuses new calls while LOG is filled to `full_at` of its limit, or the bus is away."""

    def __init__(self, bus: Bus, metrics: GatewayMetrics, full_at: float) -> None:
        self._bus = bus
        self._metrics = metrics
        self._full_at = full_at
        self._fill = 0.0

    def check(self) -> None:
        """Raise Refusal (503) when no call may begin."""
        if not self._bus.client.is_connected:
            raise unavailable("the gateway is not connected to the bus", code="log_unavailable")
        if self._fill >= self._full_at:
            raise unavailable(
                f"the log is {self._fill:.0%} full; no new calls from {self._full_at:.0%} on",
                code="log_full",
                hint="archive and purge closed runs, or raise the limit of the LOG stream",
                retry_after_s=10,
            )

    async def look(self) -> None:
        """Ask once. Raises BusError."""
        self._fill = fill(await self._bus.stream_info(subjects.LOG))
        self._metrics.log_fill.set(self._fill)

    async def run(self, poll_s: float) -> None:
        """Look every `poll_s` until cancelled."""
        while True:
            try:
                await self.look()
            except BusError as error:
                log.warning("log_fill_unknown", error=str(error))
            await asyncio.sleep(poll_s)
