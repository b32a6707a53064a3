from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.handover import Handover, Held, advance, compare, next_attempt
from rollyard.schemas import subjects
from rollyard.schemas.errors import Conflict
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import (
    CloseSession,
    DestroySandbox,
    Effect,
    Rollout,
    RolloutState,
    SandboxRef,
    StageMessage,
)

ROLLOUT = Rollout.of("run", "task", 0, 1)
REF = SandboxRef(backend="local", place="here", handle="/x")


def state_at(step: int, **changes: object) -> RolloutState:
    return structs.replace(RolloutState(rollout=ROLLOUT, step=step), **changes)


def message_at(step: int, takeover: Failure | None = None) -> StageMessage:
    return StageMessage(rollout=ROLLOUT, stage="init", step=step, attempt=1, takeover=takeover)


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_message_is_due_exactly_at_its_step(message: int, state: int) -> None:
    verdict = compare(message_at(message), state_at(state))
    expected = {0: "work", 1: "forward"}.get(state - message, "early" if state < message else "done")
    assert verdict == expected


def test_edges_of_compare() -> None:
    infra = Failure.of("infra", "gone")
    assert compare(message_at(0), None) == "early"
    assert compare(message_at(3), state_at(4, position="ended")) == "done"
    assert compare(message_at(3), state_at(3, position="committing")) == "work"
    assert compare(message_at(3, infra), state_at(3, position="committing")) == "done"
    assert compare(message_at(3, infra), state_at(3, position="run")) == "work"


@given(
    st.sampled_from(["init", "agent", "agent_budget", "llm", "eval", "infra", "cancelled"]),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_failures_retry_only_where_that_may_help(kind: str, attempt: int, most: int) -> None:
    state = state_at(4, attempt=attempt, max_attempts=most, position="run", place="here", sandbox=REF)
    failure = Failure.of(kind, "why")  # type: ignore[arg-type]
    after = next_attempt(state, failure)
    assert after.step == 5
    assert after.effects == (CloseSession(attempt=attempt), DestroySandbox(attempt=attempt, sandbox=REF))
    if failure.retryable and attempt < most:
        assert (after.position, after.attempt, after.sandbox, after.place) == ("init", attempt + 1, None, None)
        assert (after.status, after.failure) == (None, None)
    else:
        assert (after.position, after.attempt, after.failure) == ("aggregate", attempt, failure)
        assert after.status == ("cancelled" if kind == "cancelled" else "failed")


async def test_one_writer_wins_and_effects_come_before_the_message(bus: Bus) -> None:
    order: list[str] = []

    async def perform(state: RolloutState, effect: Effect) -> None:
        held_messages = (await bus.stream_info(subjects.STAGES))["state"]["messages"]
        order.append(f"{type(effect).__name__} with {held_messages} messages")

    handover = Handover(bus, perform)
    start = state_at(0)
    revision = await handover.states.create(subjects.rollout_key("run", ROLLOUT.rollout_id), start)
    winner, loser = (Held(start, revision, message_at(0)) for _ in range(2))
    after = advance(start, position="run", place="here", sandbox=REF, effects=(CloseSession(attempt=1),))
    await handover.pass_on(winner, after)
    with pytest.raises(Conflict):
        await handover.pass_on(loser, after)
    assert order == ["CloseSession with 0 messages"]
    found = await handover.read(message_at(0), 2)
    assert found is not None
    assert found[0].position == "run"
    assert found[1] == winner.revision

    # A second worker that finds the state one step ahead repeats effects and message; the bus drops the repetition.
    await handover.finish(*found, "init")
    stored = [decode(m.data, StageMessage) async for m in _stage_messages(bus)]
    assert stored == [found[0].message(found[1])]
    assert await handover.read(stored[0], 1) == found


async def _stage_messages(bus: Bus):  # type: ignore[no-untyped-def]
    for seq in range(1, 5):
        message = await bus.get(subjects.STAGES, seq)
        if message is not None:
            yield message
