"""Pools: which sandbox backends a living INIT worker offers, and which rollouts wait for one that nobody offers.

INIT workers hold a lease in the bucket `pools` for each backend, together where they are several. Contract:
docs/architecture.md sections 4 and 5.15.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode_json
from rollyard.pipeline.jetstream import NOT_FOUND, unix_ms
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import LeaseView
from rollyard.schemas import subjects
from rollyard.schemas.alarm import NO_WORKER, Alarm
from rollyard.schemas.errors import BusError, DecodeError
from rollyard.schemas.fleet import Lease
from rollyard.schemas.rollout import RolloutState

log = structlog.get_logger(__name__)

LOOK_AGAIN_S: Final = 0.2


def offer_hint(pools: Iterable[str]) -> str:
    """What somebody does about pools that nobody offers."""
    names = ", ".join(f'"{pool}"' for pool in sorted(pools))
    return f"add {names} to `[worker] backends` in rollyard.toml and start `rollyard up`, or a worker, with it"


async def living_pools(bus: Bus) -> set[str] | None:
    """The tokens of the pools that a living INIT worker offers now; None when workers here are too old to tell.

    One look, without waiting for a renewal: the age of a lease is told by the server's clock alone.
    """
    stream = subjects.kv_stream(subjects.POOLS)
    try:
        now_ms = unix_ms((await bus.stream_info(stream))["ts"])
    except BusError as error:
        if any(f"({code})" in error.message for code in NOT_FOUND):
            return None
        raise
    living: set[str] = set()
    prefix = subjects.kv_subject(subjects.POOLS, "")
    async for stored in bus.read(stream, f"{prefix}>"):
        try:
            lease: Lease = decode(stored.data, Lease)
        except DecodeError:
            continue  # a delete marker, or somebody else's record
        if now_ms - stored.time_ms <= lease.lease_s * 1000:
            living.add(stored.subject[len(prefix) :])
    return living


async def not_offered(bus: Bus, pools: Collection[str], wait_s: float = 0.0) -> list[str]:
    """Those pools that no living worker offers. Workers get `wait_s` to show themselves. Raises BusError."""
    end_s = time.monotonic() + wait_s
    while True:
        living = await living_pools(bus)
        missing = [] if living is None else sorted(pool for pool in pools if subjects.token(pool) not in living)
        if not missing or time.monotonic() >= end_s:
            return missing
        await asyncio.sleep(LOOK_AGAIN_S)


async def unserved(bus: Bus, run: str = "") -> dict[str, int]:
    """How many rollouts, of a run or of all, wait for INIT in a pool that no living worker offers, by pool."""
    subject_filter = f"stage.init.*.{subjects.token(run) if run else '*'}"
    waiting = await bus.subjects(subjects.STAGES, subject_filter)
    living = await living_pools(bus) if waiting else None
    if living is None:
        return {}
    counts: Counter[str] = Counter()
    for subject, count in waiting.items():
        _, _, pool, token = subject.split(".")
        if pool not in living:
            counts[await _name(bus, pool, token)] += count
    return dict(counts)


async def _name(bus: Bus, pool: str, run: str) -> str:
    """The name of a pool's token: of a backend with a dotted path, subjects hold only a hash."""
    if pool.startswith("="):
        async for _, state, _ in Bucket[RolloutState](bus, subjects.ROLLOUTS, RolloutState).items(f"{run}.*"):
            if state.pool and subjects.token(state.pool) == pool:
                return state.pool
    return pool


class Absences:
    """Since when rollouts wait for pools that nobody offers."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: dict[str, float] = {}

    def forgive(self) -> None:
        """Begin anew: nobody could show itself."""
        self._since_s.clear()

    def due(self, waited_for: Iterable[str], alive: Callable[[str], bool], now_s: float) -> set[str]:
        """The pools that were waited for, and offered by nobody, at every look for longer than the patience."""
        absent = {pool for pool in waited_for if not alive(pool)}
        self._since_s = {pool: self._since_s.get(pool, now_s) for pool in absent}
        return {pool for pool, since_s in self._since_s.items() if now_s - since_s > self._patience_s}


class PoolWatch:
    """Raises the alarm `no_worker`, once for each run, for the controller."""

    def __init__(self, bus: Bus, lease_s: float) -> None:
        self._bus = bus
        self._lease_s = lease_s
        self._absences = Absences(lease_s)
        self._raised: set[str] = set()

    def forgive(self) -> None:
        """Time in which the bus was away counts against nobody."""
        self._absences.forgive()

    async def look(self, waiting: Mapping[tuple[str, str], int], pools: LeaseView) -> None:
        """Look once. `waiting`: how many rollouts wait for INIT, by run and pool. Raises BusError."""
        due = self._absences.due({pool for _, pool in waiting}, pools.alive, time.monotonic())
        for run in {run for run, pool in waiting if pool in due} - self._raised:
            await self._raise(run, {pool: count for (of, pool), count in waiting.items() if of == run and pool in due})
            self._raised.add(run)

    async def _raise(self, run: str, counts: Mapping[str, int]) -> None:
        total, which = sum(counts.values()), ", ".join(f"{pool} ({counts[pool]})" for pool in sorted(counts))
        verb = "rollout waits" if total == 1 else "rollouts wait"
        alarm = Alarm(
            run=run,
            kind=NO_WORKER,
            message=f"{total} {verb} for a sandbox backend that no worker has offered for {self._lease_s:g} s: {which}",
            hint=offer_hint(counts),
            rollouts=total,
            at_ms=time.time_ns() // 1_000_000,
        )
        _, created = await self._bus.create(subjects.alarm_subject(run, NO_WORKER), encode_json(alarm))
        if created:
            log.error("alarm", run=alarm.run, kind=NO_WORKER, message=alarm.message, hint=alarm.hint)
