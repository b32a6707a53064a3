"""Hand-over between stages: the state first, then the effects that are due, then the message, then the ack.

Whoever dies in between leaves a state from which anybody can go on. Contract: docs/architecture.md 5.1 and 5.2.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import CloseSession, DestroySandbox, Effect, RolloutState, StageMessage

Verdict = Literal["work", "forward", "done", "early"]
Perform = Callable[[RolloutState, Effect], Awaitable[None]]

MAX_DELIVERIES = 5
"""A stage that sees a message more often than this does not run it again."""


@dataclass(slots=True)
class Held:
    """A rollout that a stage is working on: its state, the state's revision, and the message.

    `trouble` is what stopped the last try, as far as this process knows.
    """

    state: RolloutState
    revision: int
    message: StageMessage
    deliveries: int = 1
    trouble: str = ""


def compare(message: StageMessage, state: RolloutState | None) -> Verdict:
    """What a message means, held against the state.

    work: it is due. forward: it was handed over, but perhaps not published. done: long past. early: not due yet.
    """
    if state is None or state.step < message.step:
        return "early"
    if state.position == "ended" or state.step > message.step + 1:
        return "done"
    if state.step == message.step + 1:
        return "forward"
    if message.takeover is not None and state.position == "committing":
        return "done"
    return "work"


def next_attempt(state: RolloutState, failure: Failure) -> RolloutState:
    """The state after a failure: another attempt from INIT if that may help and is allowed, else on to aggregate."""
    if failure.retryable and state.attempt < state.max_attempts:
        return advance(
            state,
            position="init",
            effects=end_of_attempt(state),
            attempt=state.attempt + 1,
            place=None,
            sandbox=None,
            closed_seq=0,
            evaluated_seq=0,
            status=None,
            failure=None,
        )
    status: Literal["cancelled", "failed"] = "cancelled" if failure.kind == "cancelled" else "failed"
    return advance(state, position="aggregate", effects=end_of_attempt(state), status=status, failure=failure)


def end_of_attempt(state: RolloutState) -> tuple[Effect, ...]:
    """What has to be undone when an attempt ends: its session, and its sandbox with all that runs there."""
    effects: list[Effect] = [CloseSession(attempt=state.attempt)]
    if state.sandbox is not None:
        effects.append(DestroySandbox(attempt=state.attempt, sandbox=state.sandbox))
    return tuple(effects)


def advance(state: RolloutState, *, effects: Sequence[Effect] = (), **changes: object) -> RolloutState:
    """The state one hand-over further, with the effects that are due before its message goes out."""
    return structs.replace(state, step=state.step + 1, effects=tuple(effects), **changes)


class Handover:
    """Moves rollouts from stage to stage. `perform` does one effect; it must be idempotent."""

    def __init__(self, bus: Bus, perform: Perform) -> None:
        self._bus = bus
        self._perform = perform
        self.states: Bucket[RolloutState] = Bucket(bus, subjects.ROLLOUTS, RolloutState)

    async def read(self, message: StageMessage, deliveries: int) -> tuple[RolloutState, int] | None:
        """The state that a message belongs to, and its revision.

        The first delivery trusts the state that the message carries: if somebody has moved the rollout since, the
        compare-and-set at the end of the work fails. A later delivery asks the leader: a stale state would fail again.
        """
        if deliveries == 1 and message.state is not None:
            return message.state, message.revision
        rollout = message.rollout
        return await self.states.get(subjects.rollout_key(rollout.run, rollout.rollout_id))

    async def write(self, held: Held, state: RolloutState) -> None:
        """Compare-and-set the state; `held` follows. Raises Conflict when somebody else moved the rollout."""
        key = subjects.rollout_key(state.rollout.run, state.rollout.rollout_id)
        state = structs.replace(state, writer=secrets.token_hex(4))
        held.revision = await self.states.update(key, state, held.revision)
        held.state = state

    async def pass_on(self, held: Held, state: RolloutState) -> None:
        """The whole hand-over but the ack. Raises Conflict when somebody else moved the rollout."""
        stage = held.message.stage
        checkpoint(f"{stage}.before_state")
        await self.write(held, state)
        checkpoint(f"{stage}.after_state")
        await self.finish(held.state, held.revision, stage)

    async def finish(self, state: RolloutState, revision: int, stage: str) -> None:
        """Do the effects that a written state owes and publish its message. Safe to repeat."""
        for effect in state.effects:
            await self._perform(state, effect)
        checkpoint(f"{stage}.after_effects")
        message = state.message(revision)
        if message is not None:
            await self.publish(state, message)
        checkpoint(f"{stage}.after_publish")

    async def publish(self, state: RolloutState, message: StageMessage) -> None:
        """Publish the message that is due; the server drops a repetition within its window."""
        rollout = state.rollout
        subject = subjects.stage_subject(message.stage, state.where(), rollout.run)
        msg_id = f"{rollout.rollout_id}.{state.step}"
        await self._bus.publish(subject, encode(message), msg_id=msg_id)
