"""The rules that all stages share: what a message means, what becomes of one that cannot be worked on, who wins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline import consumer
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.consumer import Ack, ConsumerLoop, Dead, Nak
from rollyard.pipeline.handover import MAX_DELIVERIES, Held, advance, end_of_attempt
from rollyard.pipeline.streams import ConsumerSpec
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusFull, RollyardError
from rollyard.schemas.failure import MAX_HINT_CHARS, MAX_MESSAGE_CHARS, Failure
from rollyard.schemas.rollout import Rollout, RolloutState, SandboxRef, StageMessage, StageName
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task
from rollyard.stages.init import Init
from rollyard.stages.run import Run
from rollyard.stages.sandbox import Labels
from rollyard.stages.stage import StageContext, StageFailed, StageHandler

NOOP = Task(prompt="p", id="t", agent=AgentSpec(harness="noop"), sandbox=SandboxSpec(backend="none"))
MAX_BYTES = 16 * 1024


class Scripted:
    """A stage `run` whose work is given by the test."""

    name: StageName = "run"

    def __init__(self, work: Callable[[Held], Any]) -> None:
        self._work = work
        self.tries: list[int] = []
        self.abandoned: list[RolloutState] = []

    async def work(self, held: Held) -> RolloutState:
        self.tries.append(held.deliveries)
        state: RolloutState = await self._work(held)
        return state

    def failure(self, error: RollyardError) -> Failure | None:
        return None

    async def abandon(self, state: RolloutState) -> None:
        self.abandoned.append(state)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are given back come again without a pause."""
    monkeypatch.setattr(consumer, "backoff_s", lambda deliveries, **limits: 0.01)


def loop_for(context: StageContext, stage: Any, where: str = "any") -> ConsumerLoop:
    spec = ConsumerSpec(
        stream=subjects.STAGES,
        name=subjects.stage_consumer(stage.name, where),
        filter_subject=subjects.stage_filter(stage.name, where),
        ack_wait_s=5,
    )
    return ConsumerLoop(context.bus, spec, StageHandler(context, stage), slots=4, heartbeat_s=1)


async def at_run(crew: Any, **changes: Any) -> RolloutState:
    """A rollout whose RUN message is due."""
    ref = SandboxRef(backend="none", place="any", handle="h")
    facts = {"position": "run", "place": "any", "sandbox": ref, "step": 1} | changes
    state: RolloutState = await crew.start(NOOP, **facts)
    return state


# --- messages that cannot be worked on ---


async def test_a_message_that_cannot_be_read_is_put_aside_and_the_queue_goes_on(crew: Any) -> None:
    await crew.bus.publish("stage.init.none.r", b"\x81garbage")
    await crew.submit(NOOP)
    async with crew.at_work("admit", "init", "run", "eval", "aggregate"):
        (delivery,) = await crew.until(crew.deliveries)
    assert delivery.status == "completed"
    (letter,) = await crew.letters()
    assert (letter.stage, letter.run, letter.subject, letter.body) == ("init", "r", "stage.init.none.r", b"\x81garbage")
    assert letter.reason.startswith("not a StageMessage: ")


async def test_a_message_of_a_newer_version_waits_for_a_newer_worker(crew: Any) -> None:
    message = StageMessage(rollout=Rollout.of("r", "t", 0, 1), stage="init", step=0, attempt=1, schema_version=9)
    await crew.bus.publish("stage.init.none.r", encode(message))
    (held,) = await crew.take("init", "none")
    outcome = await StageHandler(crew.context, Init(crew.context))(held)
    assert isinstance(outcome, Nak)
    assert outcome.delay_s > 1
    assert await crew.letters() == []


async def test_a_message_without_a_state_waits_and_is_then_put_aside(crew: Any) -> None:
    message = StageMessage(rollout=Rollout.of("r", "t", 0, 1), stage="init", step=0, attempt=1)
    await crew.bus.publish("stage.init.none.r", encode(message))
    (held,) = await crew.take("init", "none")
    handler = StageHandler(crew.context, Init(crew.context))
    for deliveries in range(1, MAX_DELIVERIES + 1):
        assert isinstance(await handler(replace(held, deliveries=deliveries)), Nak)
    outcome = await handler(replace(held, deliveries=MAX_DELIVERIES + 1))
    assert outcome == Dead(f"rollout {message.rollout.rollout_id} has no state at step 0")


async def test_a_stage_that_always_crashes_fails_the_attempt_at_the_sixth_delivery(crew: Any, at_once: None) -> None:
    async def crash(held: Held) -> RolloutState:
        raise RuntimeError("a bug")

    state = await at_run(crew)
    stage, stop = Scripted(crash), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(loop_for(crew.context, stage).run(stop))

        async def moved() -> bool:
            return (await crew.state(state.rollout)).step > 1

        await crew.until(moved)
        stop.set()
    assert stage.tries == [1, 2, 3, 4, 5]
    after = await crew.state(state.rollout)
    assert (after.position, after.attempt, after.failure) == ("init", 2, None)
    (event,) = await crew.life(state.rollout)
    assert event.failure is not None
    assert (event.kind, event.attempt, event.failure.kind) == ("failed", 1, "infra")
    assert event.failure.message.startswith("run was tried 5 times and did not end; the last try: ")
    assert await crew.due() == ["stage.init.none.r"]
    assert await crew.letters() == []


async def test_a_task_that_cannot_be_read_ends_its_rollouts_as_data(crew: Any, at_once: None) -> None:
    """A broken record that the work needs is no reason to lose the message."""
    state = await at_run(crew, attempt=3)
    await crew.bus.publish(subjects.kv_subject(subjects.TASK_BUCKET, "r.t.body"), b"\x81broken")
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(loop_for(crew.context, Run(crew.context)).run(stop))

        async def moved() -> bool:
            return (await crew.state(state.rollout)).position == "aggregate"

        await crew.until(moved)
        stop.set()
    assert await crew.letters() == []
    async with crew.at_work("aggregate"):
        (delivery,) = await crew.until(crew.deliveries)
    assert (delivery.status, delivery.failure.kind, delivery.samples) == ("failed", "infra", ())


async def test_a_bus_without_room_does_not_count_against_a_message(crew: Any, at_once: None) -> None:
    full = MAX_DELIVERIES + 2

    async def work(held: Held) -> RolloutState:
        if len(stage.tries) <= full:
            raise BusFull("no room")
        return advance(held.state, position="eval")

    state = await at_run(crew)
    stage, stop = Scripted(work), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(loop_for(crew.context, stage).run(stop))

        async def moved() -> bool:
            return (await crew.state(state.rollout)).position == "eval"

        await crew.until(moved)
        stop.set()
    assert stage.tries == [1] + [2] * full
    assert await crew.due() == ["stage.eval.any.r"]


# --- who wins ---


async def test_two_workers_on_one_message_make_one_next_state_and_the_losers_sandbox_goes(crew: Any) -> None:
    task = Task(prompt="p", id="t", agent=AgentSpec(harness="command", args={"command": ["true"]}))
    state = await crew.start(task)
    (held,) = await crew.take("init", "local")
    # The server gave it to two of them: the first was silent for longer than ack_wait.
    handlers = [StageHandler(crew.context, Init(crew.context)) for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(handler(held)) for handler in handlers]
    outcomes = [done.result() for done in tries]
    assert sorted(map(str, outcomes)) == sorted(map(str, [Ack(), Nak(0.05), Nak(0.05), Nak(0.05)]))
    after = await crew.state(state.rollout)
    assert (after.position, after.step, after.attempt) == ("run", 1, 1)
    assert [ref for ref, _ in await crew.context.backends["local"].list_owned()] == [after.sandbox]
    assert len(await crew.due()) == 2  # INIT's own, which is not acknowledged yet, and RUN's
    # The losers are asked again and see that it is done.
    assert await handlers[0](replace(held, deliveries=2)) == Ack()
    assert len(await crew.due()) == 2


async def test_a_takeover_starts_the_next_attempt(crew: Any) -> None:
    state = await at_run(crew)
    takeover = StageMessage(
        rollout=state.rollout, stage="init", step=1, attempt=1, takeover=Failure.of("infra", "the place died")
    )
    for _ in range(2):
        await crew.bus.publish("stage.init.none.r", encode(takeover))
    first, second = await crew.take("init", "none", 2)
    handler = StageHandler(crew.context, Init(crew.context))
    assert await handler(first) == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.step, after.attempt, after.sandbox) == ("init", 2, 2, None)
    assert await crew.bus.last(subjects.kv_subject(subjects.SESSIONS, f"r.{state.rollout.rollout_id}.1")) is not None
    assert [event.failure.message for event in await crew.life(state.rollout)] == ["the place died"]
    # The second repeats what is due and changes nothing; nor does the RUN message, which is past now.
    assert await handler(second) == Ack()
    (due,) = await crew.take("run", "any")
    assert await StageHandler(crew.context, Run(crew.context))(replace(due, deliveries=2)) == Ack()
    assert structs.replace(await crew.state(state.rollout), writer="") == structs.replace(after, writer="")
    assert (await crew.due()).count("stage.init.none.r") == 3


async def test_a_cancelled_rollout_goes_to_aggregate_and_is_delivered(crew: Any) -> None:
    state = await at_run(crew)
    takeover = StageMessage(
        rollout=state.rollout, stage="aggregate", step=1, attempt=1, takeover=Failure.of("cancelled", "enough")
    )
    await crew.bus.publish("stage.aggregate.r", encode(takeover))
    async with crew.at_work("aggregate"):
        (delivery,) = await crew.until(crew.deliveries)
    assert (delivery.status, delivery.failure.message, delivery.samples) == ("cancelled", "enough", ())


async def test_no_takeover_leads_out_of_committing(crew: Any) -> None:
    state = await at_run(crew)
    states = StageHandler(crew.context, Init(crew.context))._handover.states
    found = await states.get(subjects.rollout_key("r", state.rollout.rollout_id))
    assert found is not None
    await states.update(
        subjects.rollout_key("r", state.rollout.rollout_id), structs.replace(state, position="committing"), found[1]
    )
    takeover = StageMessage(
        rollout=state.rollout, stage="init", step=1, attempt=1, takeover=Failure.of("infra", "the place died")
    )
    await crew.bus.publish("stage.init.none.r", encode(takeover))
    (held,) = await crew.take("init", "none")
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    assert (await crew.state(state.rollout)).position == "committing"


async def test_a_failure_of_the_work_is_logged_and_leads_on(crew: Any) -> None:
    async def fail(held: Held) -> RolloutState:
        raise StageFailed(Failure.of("agent", "it gave up", "ask again"))

    state = await at_run(crew)
    (held,) = await crew.take("run", "any")
    assert await StageHandler(crew.context, Scripted(fail))(held) == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.status, after.failure) == (
        "aggregate",
        "failed",
        Failure.of("agent", "it gave up", "ask again"),
    )


async def test_a_sandbox_that_cannot_be_removed_does_not_hold_up_its_rollout(crew: Any) -> None:
    local = crew.context.backends["local"]
    labels = Labels(run="r", rollout_id=Rollout.of("r", "t", 0, 1).rollout_id, attempt=1, owner="w", created_ms=0)
    ref = (await local.create(labels)).ref
    Path(ref.handle + ".gone").write_text("in the way")
    state = await at_run(crew, sandbox=ref, place="here")
    (held,) = await crew.take("run", "here")

    async def fail(held: Held) -> RolloutState:
        raise StageFailed(Failure.of("infra", "lost"))

    assert await StageHandler(crew.context, Scripted(fail))(held) == Ack()
    assert (await crew.state(state.rollout)).attempt == 2
    Path(ref.handle + ".gone").unlink()


# --- bounds ---

IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=256)
LONGEST = "\U0001f600" * 256


@given(IDS, IDS, st.text(max_size=3000), st.text(max_size=1000))
def test_states_and_messages_stay_below_16_kb(run: str, task_id: str, message: str, hint: str) -> None:
    check_bounds(run, task_id, message, hint)


def test_the_longest_ids_and_texts_stay_below_16_kb() -> None:
    emoji = "".join(map(chr, range(0x10000, 0x10000 + 5000)))
    check_bounds(emoji[:256], emoji[300:556], emoji, emoji[2500:])
    check_bounds(LONGEST, LONGEST, LONGEST * 20, LONGEST * 20)


def check_bounds(run: str, task_id: str, message: str, hint: str) -> None:
    ref = SandboxRef(backend="local", place="local-0123456789abcdef", handle="/" + "f" * 400)
    failure = Failure.of("infra", message, hint)
    assert len(failure.message) <= MAX_MESSAGE_CHARS
    assert len(failure.hint) <= MAX_HINT_CHARS
    state = RolloutState(
        rollout=Rollout.of(run, task_id, 4095, 4096),
        position="eval",
        place=ref.place,
        sandbox=ref,
        status="truncated",
        failure=failure,
    )
    state = structs.replace(state, effects=end_of_attempt(state))
    due = state.message(2**53)
    assert due is not None
    takeover = structs.replace(due, state=None, takeover=failure)
    for record in (state, due, takeover):
        body = encode(record)
        assert len(body) <= MAX_BYTES
        assert decode(body, type(record)) == record


def test_failures_are_cut_wherever_they_come_from() -> None:
    long = {"kind": "llm", "message": "m" * 5000, "hint": "h" * 5000}
    assert len(Failure(**long).message) == MAX_MESSAGE_CHARS  # type: ignore[arg-type]
    read = decode(encode(long), Failure)
    assert (len(read.message), len(read.hint)) == (MAX_MESSAGE_CHARS, MAX_HINT_CHARS)
