"""What all stages share: the context they work in, and the handler that holds a message against the rollout's state."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.cancels import Cancelled, Cancels
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.config import Config
from rollyard.pipeline.consumer import Ack, Dead, Nak, Outcome
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.handover import MAX_DELIVERIES, Handover, Held, compare, next_attempt
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pull import Delivered, backoff_s
from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas import subjects
from rollyard.schemas.errors import Conflict, DecodeError, RollyardError, SandboxError, TooNew
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import ClosedSession
from rollyard.schemas.rollout import (
    AgentResult,
    CloseSession,
    DestroySandbox,
    Effect,
    RolloutEvent,
    RolloutState,
    StageMessage,
    StageName,
)
from rollyard.stages.builds import ImageBuilds
from rollyard.stages.repository import RepositoryCache
from rollyard.stages.sandbox import SandboxBackend

log = structlog.get_logger(__name__)


TOO_NEW_PATIENCE: Final = 4
TROUBLES_KEPT: Final = 1000


class StageFailed(Exception):
    """The attempt has failed; the failure is what is recorded, with what the agent left behind, if anything."""

    def __init__(self, failure: Failure, result: AgentResult | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.result = result


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True, kw_only=True)
class StageContext:
    """What a worker process gives to its stages."""

    bus: Bus
    config: Config
    worker: str
    tasks: TaskStore
    cancels: Cancels
    backends: Mapping[str, SandboxBackend]
    secret: bytes = b""
    builds: ImageBuilds = field(default_factory=ImageBuilds)
    repositories: RepositoryCache = field(init=False)

    def __post_init__(self) -> None:
        self.repositories = RepositoryCache(self.config.cache_dir(), self.config.worker.cache_bytes)

    def backend(self, name: str) -> SandboxBackend:
        """The backend of that name. Raises StageFailed when this worker does not have it."""
        if name not in self.backends:
            raise StageFailed(Failure.of("infra", f"worker {self.worker} has no sandbox backend {name!r}"))
        return self.backends[name]

    async def record(self, event: RolloutEvent) -> int:
        """Log a transition; returns its sequence in LOG."""
        rollout = event.rollout
        return await self.bus.publish(subjects.log_subject(rollout.run, rollout.rollout_id, "life"), encode(event))

    async def perform(self, state: RolloutState, effect: Effect) -> None:
        """Do one effect of a hand-over; doing it again changes nothing."""
        match effect:
            case CloseSession(attempt=attempt):
                sessions: Bucket[ClosedSession] = Bucket(self.bus, subjects.SESSIONS, ClosedSession)
                key = subjects.session_key(state.rollout.run, state.rollout.rollout_id, attempt)
                await sessions.put(key, ClosedSession(at_ms=now_ms()))
            case DestroySandbox(sandbox=ref):
                backend = self.backends.get(ref.backend)
                if backend is None or not backend.reaches(ref.place):
                    log.info("sandbox_out_of_reach", place=ref.place, handle=ref.handle)
                    return
                try:
                    await (await backend.open(ref)).destroy()
                except SandboxError as error:
                    # The session is closed, so nothing that still runs there counts; the sweeper tries again.
                    log.warning("sandbox_not_removed", handle=ref.handle, error=str(error))


def gave_up(stage: str, held: Held) -> str:
    """What is said of a rollout that a stage does not try again."""
    last = f"; the last try: {held.trouble}" if held.trouble else ""
    return f"{stage} was tried {MAX_DELIVERIES} times and did not end{last}"


class Stage(Protocol):
    """One stage: the work that leads from one state of a rollout to the next."""

    name: StageName

    async def work(self, held: Held) -> RolloutState:
        """Do the work, log what it found, and return the next state. Raises StageFailed, RollyardError."""
        ...

    def failure(self, error: RollyardError) -> Failure | None:
        """What an error of this stage means for the attempt; None: nothing, deliver the message again."""
        ...

    async def abandon(self, state: RolloutState) -> None:
        """Undo work whose result was not taken, since somebody else moved the rollout."""
        ...


class StageHandler:
    """Handles the messages of one stage: the same rules for all of them."""

    def __init__(self, context: StageContext, stage: Stage) -> None:
        self._context = context
        self._stage = stage
        self._handover = Handover(context.bus, context.perform)
        self._troubles: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, delivered: Delivered) -> Outcome:
        """Work on one message. Raises RollyardError when it is to come again."""
        try:
            message: StageMessage = decode(await delivered.body(), StageMessage)
        except TooNew as error:
            # While releases are mixed, a newer worker will take it.
            log.error("message_of_a_newer_release", subject=delivered.subject, error=str(error))
            return Nak(backoff_s(max(delivered.deliveries, TOO_NEW_PATIENCE)))
        except DecodeError as error:
            return Dead(str(error))
        checkpoint(f"{self._stage.name}.received")
        found = await self._handover.read(message, delivered.deliveries)
        verdict = compare(message, found[0] if found else None)
        if found is None or verdict == "early":
            if delivered.deliveries > MAX_DELIVERIES:
                return Dead(f"rollout {message.rollout.rollout_id} has no state at step {message.step}")
            return Nak(backoff_s(delivered.deliveries))
        trouble = self._troubles.pop(message.rollout.rollout_id, "")
        held = Held(found[0], found[1], message, delivered.deliveries, trouble)
        if verdict == "forward":
            await self._handover.finish(held.state, held.revision, self._stage.name)
        elif verdict == "work" and not await self._advance(held):
            return Nak(0.05)
        return Ack()

    async def _advance(self, held: Held) -> bool:
        """Take the rollout one step further; False when somebody else moved it meanwhile."""
        try:
            state = await self._next_state(held)
        except Exception as error:
            self._remember(held, error)
            if isinstance(error, Conflict):
                return False
            raise
        try:
            await self._handover.pass_on(held, state)
        except Conflict:
            log.info("lost_to_another_writer", rollout=state.rollout.rollout_id, stage=self._stage.name)
            await self._stage.abandon(state)
            return False
        return True

    def _remember(self, held: Held, error: Exception) -> None:
        """Keep what stopped this try, so that giving up can name it."""
        self._troubles[held.state.rollout.rollout_id] = f"{type(error).__name__}: {error}"[:500]
        if len(self._troubles) > TROUBLES_KEPT:
            self._troubles.popitem(last=False)

    async def _next_state(self, held: Held) -> RolloutState:
        failure, result = self._given_up(held), None
        if failure is None:
            try:
                if self._stage.name == "aggregate":
                    return await self._stage.work(held)
                with self._context.cancels.scope(held.state.rollout):
                    return await self._stage.work(held)
            except Cancelled:
                failure = self._cancel(held)
            except StageFailed as failed:
                failure, result = failed.failure, failed.result
            except RollyardError as error:
                known = self._stage.failure(error)
                if known is None:
                    raise
                failure = known
        await self._context.record(
            RolloutEvent(
                kind="failed",
                rollout=held.state.rollout,
                attempt=held.state.attempt,
                at_ms=now_ms(),
                worker=self._context.worker,
                result=result,
                failure=failure,
            )
        )
        return next_attempt(held.state, failure)

    def _given_up(self, held: Held) -> Failure | None:
        """Why this message is not to be worked on, or None."""
        if held.message.takeover is not None:
            return held.message.takeover
        if held.deliveries > MAX_DELIVERIES and self._stage.name != "aggregate":
            return Failure.of(
                "infra",
                gave_up(self._stage.name, held),
                "see the log of its workers for this rollout",
            )
        return None

    def _cancel(self, held: Held) -> Failure:
        cancel = self._context.cancels.find(held.state.rollout)
        return Failure.of("cancelled", cancel.reason if cancel else "cancelled")
