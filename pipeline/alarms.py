"""Alarms of runs: counted over the headers of all deliveries, raised once.

An alarm of these kinds is a function of the deliveries in their order. So whoever reads SAMPLES from its beginning
comes to the same one: a controller that starts again, or a second one. Contract: docs/architecture.md section 5.14.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode_json
from rollyard.pipeline.config import AlarmsConfig
from rollyard.pipeline.delivery_headers import DeliveryFacts
from rollyard.pipeline.follow import CaughtUp, follow
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.alarm import DRIFT, KINDS, ZERO_TRAINABLE, Alarm
from rollyard.schemas.errors import BusError, DecodeError
from rollyard.schemas.fleet import Run

log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0
STITCHED: Final = ("completed", "truncated")


@dataclass(slots=True)
class Tally:
    """What the deliveries of one run add up to; `raised` are the kinds of alarms that were raised from it."""

    rollouts: int = 0
    calls: int = 0
    drifted: int = 0
    called: int = 0
    barren: int = 0
    raised: set[str] = field(default_factory=set)

    def add(self, facts: DeliveryFacts) -> None:
        """Count one delivery. Failed and cancelled rollouts are left out: their calls are not looked at for drift."""
        if facts.status not in STITCHED:
            return
        self.rollouts += 1
        self.calls += facts.calls
        self.drifted += facts.drifted
        # A sample policy may leave out truncated rollouts, and an agent may call no model: neither is a fault.
        if facts.status == "completed" and facts.calls:
            self.called += 1
            self.barren += not facts.trained_tokens

    def due(self, limits: AlarmsConfig) -> list[str]:
        """The kinds of alarms that are to be raised now."""
        passed = []
        if self.calls >= limits.min_calls and self.drifted / self.calls > limits.drift_share:
            passed.append(DRIFT)
        if self.called >= limits.min_rollouts and self.barren / self.called > limits.zero_trainable_share:
            passed.append(ZERO_TRAINABLE)
        return [kind for kind in passed if kind not in self.raised]

    def alarm(self, kind: str, limits: AlarmsConfig, run: str, at_ms: int) -> Alarm:
        """The alarm of a kind that is due."""
        if kind == DRIFT:
            part, whole, threshold = self.drifted, self.calls, limits.drift_share
            what = "calls leave the tokens that were sampled before them"
            hint = f"`rollyard samples drift --run {shlex.quote(run)}` shows where and why"
        else:
            part, whole, threshold = self.barren, self.called, limits.zero_trainable_share
            what = "completed rollouts called a model and have no token to train on"
            hint = "`excluded` of a delivery says why; does the model server return token ids (`rollyard llm ls`)?"
        return Alarm(
            run=run,
            kind=kind,
            message=f"{part} of {whole} {what}: {part / whole:.1%}, over the threshold of {threshold:.1%}",
            hint=hint,
            value=part / whole,
            threshold=threshold,
            rollouts=self.rollouts,
            calls=self.calls,
            at_ms=at_ms,
        )


class AlarmWatch:
    """Counts the deliveries of all runs and raises their alarms. `await AlarmWatch(bus, limits).run()`."""

    def __init__(self, bus: Bus, limits: AlarmsConfig) -> None:
        self._bus = bus
        self._limits = limits
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)

    async def run(self) -> None:
        """Count without end, first what is stored. Waits for a bus that is away. Raises BusError when it is closed."""
        async for item in follow(self._bus, subjects.SAMPLES, "sample.*.*.*", headers_only=True):
            if isinstance(item, CaughtUp):
                continue
            # A subject that somebody else made up may be longer than any name of ours.
            run = item.subject.split(".")[1][: subjects.MAX_ID_CHARS]
            tally = self._tallies[run]
            tally.add(DeliveryFacts.read(item.headers))
            for kind in tally.due(self._limits):
                await self._raise(run, kind, item.time_ms)
                tally.raised.add(kind)

    async def _raise(self, token: str, kind: str, at_ms: int) -> None:
        while True:
            try:
                run = await self._run(token)
                if kind == ZERO_TRAINABLE and not run.training:
                    return
                alarm = self._tallies[token].alarm(kind, self._limits, run.run, at_ms)
                _, created = await self._bus.create(subjects.alarm_subject(token, kind), encode_json(alarm))
            except BusError as error:
                if self._bus.closed.is_set():
                    raise
                log.warning("alarm_waits_for_the_bus", run=token, kind=kind, error=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            if created:
                log.error("alarm", run=alarm.run, kind=kind, message=alarm.message, hint=alarm.hint)
            return

    async def _run(self, token: str) -> Run:
        """The run of a token: subjects may hold only a hash of its name."""
        try:
            found = await Bucket[Run](self._bus, subjects.RUNS, Run).get(token)
        except DecodeError as error:
            log.warning("run_not_readable", error=str(error))
            found = None
        return found[0] if found else Run(run=token)


async def alarms(bus: Bus, run: str | None = None) -> AsyncIterator[Alarm]:
    """The alarms that were raised, of one run or of all, oldest first. Raises BusError, DecodeError."""
    name = subjects.token(run) if run is not None else "*"
    async for stored in bus.read(subjects.ALARMS, f"alarm.{name}.*"):
        yield decode(stored.data, Alarm)


async def kinds_raised(bus: Bus, run: str) -> tuple[str, ...]:
    """The kinds of alarms that a run raised; none also in an installation that is too old to raise any."""
    return tuple([kind for kind in KINDS if await bus.last(subjects.alarm_subject(run, kind)) is not None])
