"""Leases: who is alive. The holder renews its key; readers judge its age by their own clock, never by another's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.watching import watching
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import Lease

log = structlog.get_logger(__name__)


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
    """A local view of a bucket of leases. Make one with `async with LeaseView.following(bus, bucket) as view`."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    @classmethod
    @asynccontextmanager
    async def following(cls, bus: Bus, bucket: str) -> AsyncIterator[LeaseView]:
        """A view that holds every lease that was held before this call."""
        view = cls()

        async def watch(ready: asyncio.Event) -> None:
            async for key, lease, _ in Bucket[Lease](bus, bucket, Lease).watch():
                if not key:
                    ready.set()
                elif lease is None:
                    view._seen.pop(key, None)
                else:
                    view._seen[key] = _Seen(lease, time.monotonic())

        async with watching(watch):
            yield view

    def alive(self, owner: str) -> bool:
        """Whether the owner holds a lease that was renewed in time; False when it never had one or gave it back."""
        seen = self._seen.get(subjects.token(owner))
        return seen is not None and time.monotonic() - seen.at_s <= seen.lease.lease_s

    def owners(self) -> list[str]:
        """Everybody who has a key, dead ones included."""
        return [seen.lease.owner for seen in self._seen.values()]
