"""The controller: closes groups, carries cancels to rollouts that nobody holds, sweeps up after dead places, and raises
alarms about runs.

It never writes a rollout's state. For a state that cannot go on by itself it publishes a takeover, again at each tick,
to a stage whose compare-and-set does the rest. It holds nothing that it cannot rebuild, and several may run.
Contract: docs/architecture.md sections 5.2, 5.8, 5.14, 5.15 and 8.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import structlog

from rollyard.pipeline.alarms import AlarmWatch
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.cancels import Cancels
from rollyard.pipeline.codec import encode
from rollyard.pipeline.config import AlarmsConfig, Config
from rollyard.pipeline.groups import close_if_complete
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import LeaseView
from rollyard.pipeline.pools import PoolWatch
from rollyard.pipeline.watching import watching
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import RolloutState, StageMessage, StageName
from rollyard.schemas.task import TaskProgress

log = structlog.get_logger(__name__)

TICK_S: Final = 1.0
GROUP_LOOK_S: Final = 10.0
GATEWAY_MOURNED_S: Final = 60.0
ANYWHERE: Final = "any"


class Controller:
    """One controller. `await Controller(bus).run(stop)`."""

    def __init__(
        self, bus: Bus, *, lease_s: float = 30.0, tick_s: float = TICK_S, alarms: AlarmsConfig | None = None
    ) -> None:
        self._bus = bus
        self._alarms = AlarmWatch(bus, alarms or AlarmsConfig())
        self._pools = PoolWatch(bus, lease_s)
        self._lease_s = lease_s
        self._tick_s = tick_s
        self._live: dict[str, RolloutState] = {}
        self._open_tasks: dict[str, TaskProgress] = {}
        self._since_s = time.monotonic()
        self._dead_since_s: dict[str, float] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep until `stop` is set."""
        async with (
            watching(self._follow_rollouts),
            watching(self._follow_tasks),
            watching(self._watch_alarms),
            LeaseView.following(self._bus, subjects.NODES) as nodes,
            LeaseView.following(self._bus, subjects.GATEWAYS) as gateways,
            LeaseView.following(self._bus, subjects.POOLS) as pools,
            Cancels.following(self._bus) as cancels,
        ):
            self._since_s = time.monotonic()
            looked_s = 0.0
            while not stop.is_set():
                try:
                    await self._pools.look(await self._sweep(nodes, cancels), pools)
                    if time.monotonic() - looked_s > GROUP_LOOK_S:
                        looked_s = time.monotonic()
                        await self._close_groups()
                        await self._forget_gateways(gateways)
                except BusError as error:
                    if self._bus.closed.is_set():
                        raise
                    log.warning("sweep_failed", error=error.message)
                    # Nobody could renew a lease meanwhile: every place gets the time of one to show itself.
                    self._since_s = time.monotonic()
                    self._pools.forgive()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_s):
                        await stop.wait()

    async def _follow_rollouts(self, ready: asyncio.Event) -> None:
        bucket: Bucket[RolloutState] = Bucket(self._bus, subjects.ROLLOUTS, RolloutState)
        async for key, state, _ in bucket.watch():
            if not key:
                ready.set()
            elif state is None or state.position == "ended":
                self._live.pop(key, None)
            else:
                self._live[key] = state

    async def _follow_tasks(self, ready: asyncio.Event) -> None:
        bucket: Bucket[TaskProgress] = Bucket(self._bus, subjects.TASK_BUCKET, TaskProgress)
        async for key, progress, _ in bucket.watch("*.*"):
            if not key:
                ready.set()
            elif progress is None or progress.progress == "closed":
                self._open_tasks.pop(key, None)
            else:
                self._open_tasks[key] = progress

    async def _watch_alarms(self, ready: asyncio.Event) -> None:
        ready.set()  # to count what is stored may take long: no cancel and no dead place waits for that
        await self._alarms.run()

    async def _sweep(self, nodes: LeaseView, cancels: Cancels) -> Counter[tuple[str, str]]:
        """Take over what cannot go on. Gives how many rollouts wait for INIT, by run and pool."""
        await self._bus.api("INFO")  # nobody is dead as long as the bus itself is
        # A place that this controller has never seen alive gets the time of one lease to show itself.
        settled = time.monotonic() - self._since_s > self._lease_s
        dead: set[str] = set()
        waiting: Counter[tuple[str, str]] = Counter()
        for state in list(self._live.values()):
            if state.position not in ("init", "run", "eval"):
                continue
            cancel = cancels.find(state.rollout)
            if cancel is not None:
                await self._take_over(state, Failure.of("cancelled", cancel.reason))
            elif state.place and state.place != ANYWHERE and settled and not nodes.alive(state.place):
                dead.add(state.place)
                failure = Failure.of("infra", f"the place {state.place} died", "is the machine of these workers alive?")
                if await self._take_over(state, failure):
                    waiting[state.rollout.run, state.pool] += 1
            elif state.position == "init":
                waiting[state.rollout.run, state.pool] += 1
        if settled:
            await self._forget(set(nodes.owners()) - dead, nodes)
        return waiting

    async def _take_over(self, state: RolloutState, failure: Failure) -> bool:
        """Have a state replaced; whether INIT is to do it, for another attempt."""
        again = failure.retryable and state.attempt < state.max_attempts
        stage: StageName = "init" if again else "aggregate"
        where = state.pool if again else None
        message = StageMessage(
            rollout=state.rollout, stage=stage, step=state.step, attempt=state.attempt, takeover=failure
        )
        log.info("takeover", rollout=state.rollout.rollout_id, step=state.step, to=stage, reason=failure.message)
        # The server drops repetitions within its window: where nobody takes them, they must not fill the stream.
        msg_id = f"{state.rollout.rollout_id}.{state.step}.{stage}.takeover"
        subject = subjects.stage_subject(stage, where, state.rollout.run)
        await self._bus.publish(subject, encode(message), msg_id=msg_id)
        return again

    async def _forget(self, without_states: set[str], nodes: LeaseView) -> None:
        """Delete consumers, messages and lease of dead places that no state names any more."""
        named = {state.place for state in self._live.values()}
        for place in without_states - named:
            if nodes.alive(place):
                continue
            for subject, consumer in _of_place(place):
                with suppress(BusError):
                    await self._bus.api(f"CONSUMER.DELETE.{subjects.STAGES}.{consumer}")
                await self._bus.api(f"STREAM.PURGE.{subjects.STAGES}", {"filter": subject})
            await Bucket(self._bus, subjects.NODES, object).delete(subjects.token(place))
            log.info("place_forgotten", place=place)

    async def _forget_gateways(self, gateways: LeaseView) -> None:
        """Delete the leases of gateways that have been dead for long: whoever asks all gateways would wait for them."""
        now_s = time.monotonic()
        dead = {owner for owner in gateways.owners() if not gateways.alive(owner)}
        self._dead_since_s = {owner: self._dead_since_s.get(owner, now_s) for owner in dead}
        for owner, since_s in list(self._dead_since_s.items()):
            if now_s - since_s > GATEWAY_MOURNED_S:
                await Bucket(self._bus, subjects.GATEWAYS, object).delete(subjects.token(owner))
                log.info("gateway_forgotten", incarnation=owner)

    async def _close_groups(self) -> None:
        busy = {subjects.task_key(state.rollout.run, state.rollout.task_id) for state in self._live.values()}
        for key, progress in list(self._open_tasks.items()):
            if progress.progress == "fanned_out" and key not in busy:
                await close_if_complete(self._bus, progress.run, progress.task_id, progress.group_size)


def _of_place(place: str) -> Iterator[tuple[str, str]]:
    for stage in ("run", "eval"):
        yield subjects.stage_filter(stage, place), subjects.stage_consumer(stage, place)


async def run_controller(bus: Bus, stop: asyncio.Event, config: Config) -> None:
    """Run one controller until `stop` is set."""
    await Controller(bus, lease_s=config.worker.lease_s, alarms=config.alarms).run(stop)


__all__ = ["Controller", "run_controller"]
