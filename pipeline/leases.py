"""Leases: who is alive. The holder renews its key; readers judge its age by their own clock, never by another's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import structlog
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.watching import watching
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import Lease

log = structlog.get_logger(__name__)

BEAT_S: Final = 1.0


@asynccontextmanager
async def hold_lease(
    bus: Bus, bucket: str, lease: Lease, *, release: bool = True, renewed: Callable[[], None] | None = None
) -> AsyncIterator[None]:
    """Keep a lease alive within the block, renewed three times in its length.

    `release` removes it at a clean end; leave it False for a lease that several processes hold together. `renewed` is
    called after each renewal.
    """
    leases: Bucket[Lease] = Bucket(bus, bucket, Lease)
    key = subjects.token(lease.owner)
    await leases.put(key, lease)

    async def renew() -> None:
        current = lease
        while True:
            if renewed is not None:
                renewed()
            await asyncio.sleep(lease.lease_s / 3)
            current = structs.replace(current, renewal=current.renewal + 1)
            try:
                await leases.put(key, current)
            except BusError as error:
                if bus.closed.is_set():
                    raise
                log.warning("lease_not_renewed", owner=lease.owner, error=error.message)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, BusError):
            await task
        if release and not bus.closed.is_set():
            with suppress(BusError):
                await leases.delete(key)


@dataclass(slots=True)
class _Seen:
    lease: Lease
    at_s: float


class LeaseView:
    """A local view of a bucket of leases. Make one with `async with LeaseView.following(bus, bucket) as view`.

    Time in which this view could not hear anybody counts against nobody: while the bus was away, and while this process
    itself stood still.
    """

    def __init__(self, bus: Bus, bucket: str) -> None:
        self._bus = bus
        self._leases: Bucket[Lease] = Bucket(bus, bucket, Lease)
        self._seen: dict[str, _Seen] = {}
        self._beat_s = time.monotonic()

    @classmethod
    @asynccontextmanager
    async def following(cls, bus: Bus, bucket: str) -> AsyncIterator[LeaseView]:
        """A view that holds every lease that was held before this call."""
        view = cls(bus, bucket)

        async def watch(ready: asyncio.Event) -> None:
            async for key, lease, _ in view._leases.watch():
                if not key:
                    ready.set()
                elif lease is None:
                    view._seen.pop(key, None)
                else:
                    view._seen[key] = _Seen(lease, time.monotonic())

        beat = asyncio.create_task(view._beat())
        bus.on_reconnect.add(view._forgive)
        try:
            async with watching(watch):
                yield view
        finally:
            bus.on_reconnect.discard(view._forgive)
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            if self._is_deaf():
                self._forgive()
            self._beat_s = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def _is_deaf(self) -> bool:
        return not self._bus.client.is_connected or time.monotonic() - self._beat_s > 2 * BEAT_S

    def _forgive(self) -> None:
        for seen in self._seen.values():
            seen.at_s = time.monotonic()

    def alive(self, owner: str) -> bool:
        """Whether the owner holds a lease that was renewed in time; False when it never had one or gave it back."""
        seen = self._seen.get(subjects.token(owner)) if owner else None
        if seen is None:
            return False
        return self._is_deaf() or time.monotonic() - seen.at_s <= seen.lease.lease_s

    async def is_dead(self, owner: str) -> bool:
        """Whether nothing of the owner may be expected any more. Asks the bucket about a lease not seen yet.

        Nobody, the empty name, is dead: so are called the gateways of calls that no gateway made.
        """
        if not owner or self.alive(owner):
            return not owner
        key = subjects.token(owner)
        return key in self._seen or await self._leases.get(key) is None

    def living(self) -> list[Lease]:
        """The leases of everybody who is alive."""
        return [seen.lease for seen in self._seen.values() if self.alive(seen.lease.owner)]

    def owners(self) -> list[str]:
        """Everybody who has a key, dead ones included."""
        return [seen.lease.owner for seen in self._seen.values()]
