"""A gateway process says that it lives: one lease in the `gateways` bucket for each start of a process."""

from __future__ import annotations

import asyncio

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import Lease

log = structlog.get_logger(__name__)


class GatewayLease:
    """The lease of `incarnation`, renewed every third of `lease_s`."""

    def __init__(self, bus: Bus, incarnation: str, lease_s: float) -> None:
        self._bucket: Bucket[Lease] = Bucket(bus, subjects.GATEWAYS, Lease)
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._renewal = 0

    async def renew(self, url: str) -> None:
        """Write it once. Raises BusError."""
        lease = Lease(owner=self._incarnation, lease_s=self._lease_s, renewal=self._renewal, url=url)
        self._renewal += 1
        await self._bucket.put(self._incarnation, lease)

    async def run(self, url: str) -> None:
        """Renew until cancelled. A bus that is away is no reason to stop: calls fail by themselves then."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self.renew(url)
            except BusError as error:
                log.warning("lease_not_renewed", error=str(error))

    async def release(self) -> None:
        """Say that this process ends: what it left open need not be waited for."""
        if not self._bucket.bus.client.is_connected:
            return
        try:
            await self._bucket.delete(self._incarnation)
        except BusError as error:
            log.warning("lease_not_released", error=str(error))
