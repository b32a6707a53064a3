"""ADMIT: from a task on the bus to the rollouts of its group, once, with bounds and in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import CapturingLogger

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode, encode_json
from rollyard.pipeline.config import AdmitConfig
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Cancel, Run
from rollyard.schemas.rollout import Rollout, RolloutState
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task, TaskProgress
from rollyard.stages import admit as admit_module
from rollyard.stages.admit import Admit
from rollyard.stages.plugin_check import check_task

NOOP = Task(prompt="p", agent=AgentSpec(harness="noop"), sandbox=SandboxSpec(backend="none"))


def noop(task_id: str, group_size: int = 1) -> Task:
    return structs.replace(NOOP, id=task_id, group_size=group_size)


@asynccontextmanager
async def admitting(
    crew: Any, check: Callable[[Task], list[str]] = check_task, **settings: Any
) -> AsyncIterator[asyncio.Event]:
    """An ADMIT at work within the block; gives the event that stops it."""
    context = structs.replace(crew.config, admit=AdmitConfig(**settings))
    crew.context.config = context
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(Admit(crew.context, check).run(stop))
        try:
            yield stop
        finally:
            stop.set()


async def progress(bus: Bus, run: str = "r") -> dict[str, str]:
    """How far each task of a run is."""
    bucket: Bucket[TaskProgress] = Bucket(bus, subjects.TASK_BUCKET, TaskProgress)
    return {task.task_id: task.progress async for _, task, _ in bucket.items(f"{subjects.token(run)}.*")}


async def states(bus: Bus) -> list[RolloutState]:
    return [state async for _, state, _ in Bucket(bus, subjects.ROLLOUTS, RolloutState).items()]


async def tasks_left(bus: Bus) -> int:
    return int((await bus.stream_info(subjects.TASKS))["state"]["messages"])


async def nothing_left(bus: Bus) -> None:
    while await tasks_left(bus):  # noqa: ASYNC110 - admit is at work meanwhile
        await asyncio.sleep(0.02)


async def test_a_task_becomes_the_states_and_messages_of_its_group(crew: Any) -> None:
    await crew.submit(structs.replace(noop("t", 5), max_attempts=7))
    async with admitting(crew):
        await nothing_left(crew.bus)
    assert await crew.due() == ["stage.init.none.r"] * 5
    found = await states(crew.bus)
    assert sorted(state.rollout.index for state in found) == [0, 1, 2, 3, 4]
    for state in found:
        assert state.rollout == Rollout.of("r", "t", state.rollout.index, 5)
        assert (state.position, state.step, state.attempt, state.max_attempts, state.pool) == ("init", 0, 1, 7, "none")
    assert await progress(crew.bus) == {"t": "fanned_out"}
    assert (await crew.context.tasks.get("r", "t")).max_attempts == 7


async def test_what_comes_by_plain_nats_in_json_opens_its_run(crew: Any) -> None:
    await crew.bus.publish(
        "task.new-run", b' {"prompt": "p", "agent": {"harness": "noop"}, "sandbox": {"backend": "none"}}'
    )
    async with admitting(crew):
        await nothing_left(crew.bus)
    run = await Bucket(crew.bus, subjects.RUNS, Run).get("new-run")
    assert run is not None
    assert run[0].run == "new-run"
    assert list(await progress(crew.bus, "new-run")) == [NOOP.with_id().id]


async def test_the_same_task_again_changes_nothing(crew: Any) -> None:
    await crew.submit(noop("t", 2), noop("t", 2))
    async with admitting(crew):
        await nothing_left(crew.bus)
        await crew.bus.publish("task.r", encode_json(noop("t", 2)))
        await nothing_left(crew.bus)
    assert await crew.due() == ["stage.init.none.r"] * 2
    assert await crew.letters() == []


async def test_an_id_with_other_content_is_put_aside_with_the_reason(crew: Any) -> None:
    other = structs.replace(noop("t", 2), prompt="other")
    await crew.submit(noop("t", 2))
    async with admitting(crew):
        await nothing_left(crew.bus)
        await crew.submit(other)
        await nothing_left(crew.bus)
    (letter,) = await crew.letters("r")
    assert (
        letter.reason
        == "task id 't' is taken in run 'r' by a task with other content (give the new task an id of its own)"
    )
    assert letter.body == encode(other)
    assert len(await crew.due()) == 2
    assert (await crew.context.tasks.get("r", "t")).prompt == "p"


async def test_two_tasks_with_one_id_at_once_have_one_winner(crew: Any) -> None:
    await crew.submit(*(structs.replace(noop("t"), prompt=f"p{number}") for number in range(8)))
    async with admitting(crew):
        await nothing_left(crew.bus)
    assert len(await crew.letters("r")) == 7
    assert await crew.due() == ["stage.init.none.r"]


async def test_bad_tasks_are_put_aside_and_the_queue_goes_on(crew: Any) -> None:
    bad = {
        b"hello": "malformed JSON",
        b'{"prompt": ""}': "prompt: must not be empty",
        b'{"prompt": "p", "agent": {"harness": "aks"}}': "agent.harness: no harness is called 'aks'",
        b'{"prompt": "p", "evaluation": {"rule": "exakt"}}': "evaluation.rule: no evaluation rule is called 'exakt'",
        b'{"prompt": "p", "sandbox": {"backend": "moon"}}': "sandbox.backend: ",
        b'{"prompt": "p", "agent": {"harness": "noop", "args": {"sleep_s": -1}}}': "agent.args.sleep_s: ",
    }
    for body in bad:
        await crew.bus.publish("task.r", body)
    await crew.submit(noop("good"))
    async with admitting(crew):
        await nothing_left(crew.bus)
    found = {letter.body: letter.reason for letter in await crew.letters("r")}
    assert set(found) == set(bad)
    for body, says in bad.items():
        assert says in found[body]
    assert await progress(crew.bus) == {"good": "fanned_out"}


@pytest.mark.parametrize(
    ("subject", "mend"), [("task.a/b", "published to task.=44"), (f"task.{'x' * 300}", "at most 256 characters")]
)
async def test_a_subject_that_is_no_runs_is_put_aside(crew: Any, subject: str, mend: str) -> None:
    await crew.bus.publish(subject, encode(noop("lost")))
    await crew.submit(noop("good"), run="zzz")
    async with admitting(crew):
        await nothing_left(crew.bus)
    (letter,) = await crew.letters()
    assert "is not the subject of a run" in letter.reason
    assert mend.replace("=44", subjects.token("a/b")) in letter.reason
    assert await progress(crew.bus, "zzz") == {"good": "fanned_out"}


async def test_a_task_that_admit_crashes_on_is_put_aside_after_some_tries(
    crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admit_module, "MOST_BACKOFF_S", 0.01)
    tries: Counter[str] = Counter()

    def check(task: Task) -> list[str]:
        tries[task.id] += 1
        return [str(1 // 0)] if task.id == "bad" else []

    await crew.submit(noop("bad"), noop("good"))
    async with admitting(crew, check):
        await nothing_left(crew.bus)
    assert tries == {"bad": 6, "good": 1}
    (letter,) = await crew.letters("r")
    assert (
        letter.reason == "admit crashed 6 times on this task: ZeroDivisionError('integer division or modulo by zero')"
    )


async def test_a_cancelled_task_goes_straight_to_aggregate(crew: Any) -> None:
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(subjects.cancel_key("r", "t", 1), Cancel(reason="enough"))

    async def known() -> bool:
        return crew.context.cancels.find(Rollout.of("r", "t", 1, 2)) is not None

    await crew.until(known)
    await crew.submit(noop("t", 2))
    async with admitting(crew):
        await nothing_left(crew.bus)
    assert await crew.due() == ["stage.aggregate.r", "stage.init.none.r"]
    (cancelled,) = [state for state in await states(crew.bus) if state.position == "aggregate"]
    assert (cancelled.status, cancelled.failure.message) == ("cancelled", "enough")  # type: ignore[union-attr]


async def test_what_died_in_the_middle_of_a_fan_out_is_finished(crew: Any) -> None:
    """Some rollouts have their state, one of them its message too; the rest of the group has nothing."""
    task = noop("t", 4)
    store = crew.context.tasks.progress
    await store.create("r.t", TaskProgress(content_hash=task.content_hash(), group_size=4, task_id="t", run="r"))
    await crew.start(task, 0)
    handover = Bucket(crew.bus, subjects.ROLLOUTS, RolloutState)
    for index in (1, 2):
        rollout = Rollout.of("r", "t", index, 4)
        step = index - 1  # the last one has gone on already
        await handover.create(
            subjects.rollout_key("r", rollout.rollout_id), RolloutState(rollout=rollout, pool="none", step=step)
        )
    await crew.submit(task)
    async with admitting(crew):
        await nothing_left(crew.bus)
    assert await crew.due() == ["stage.init.none.r"] * 3
    assert len(await states(crew.bus)) == 4
    assert await progress(crew.bus) == {"t": "fanned_out"}


# --- bounds ---


async def test_no_more_is_let_in_than_the_window_and_one_turn(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_module, "TASKS_AT_A_TIME", 2)
    await crew.submit(*(noop(f"t{number}", 3) for number in range(20)))
    most = finished = 0
    async with admitting(crew, window=6):
        while finished < 60:
            held = await crew.take("init", "none") if await crew.due() else []
            most = max(most, len(await crew.due()))
            for message in held:
                await message.ack()
                finished += 1
    assert most <= 6 + 2 * 3
    assert await tasks_left(crew.bus) == 0


async def test_runs_take_turns(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with many tasks does not keep the others out, also when there are more runs than one turn visits."""
    monkeypatch.setattr(admit_module, "TASKS_AT_A_TIME", 1)
    monkeypatch.setattr(admit_module, "RUNS_AT_A_TIME", 2)
    runs = ["a", "b", "c", "d", "e"]
    for run in runs:
        await crew.submit(*(noop(f"t{number}") for number in range(6)), run=run)
    order: list[str] = []
    async with admitting(crew, window=1):
        while len(order) < 30:
            (message,) = await crew.take("init", "none")
            order.append(message.subject.rpartition(".")[2])
            await message.ack()
    for turn in range(0, 30, 5):
        assert Counter(order[turn : turn + 5]) == Counter(runs)


async def test_a_stream_that_is_filling_up_stops_it_until_there_is_room(
    crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms = CapturingLogger()
    monkeypatch.setattr(admit_module, "log", alarms)
    monkeypatch.setattr(admit_module, "FULL_LOOK_S", 0.05)
    config = (await crew.bus.stream_info(subjects.LOG))["config"]
    await crew.bus.api("STREAM.UPDATE.LOG", config | {"max_bytes": 100_000})
    for _ in range(8):
        await crew.bus.publish("log.old.r1.call", b"x" * 9_000)
    await crew.submit(noop("t", 2))
    async with admitting(crew):
        while not alarms.calls:  # noqa: ASYNC110 - admit is at work meanwhile
            await asyncio.sleep(0.02)
        assert (alarms.calls[0].method_name, alarms.calls[0].args) == ("error", ("admit_stopped_stream_full",))
        assert alarms.calls[0].kwargs["stream"] == subjects.LOG
        assert await tasks_left(crew.bus) == 1
        assert await crew.due() == []
        await crew.bus.api("STREAM.PURGE.LOG", {"filter": "log.old.>"})
        await nothing_left(crew.bus)
    assert len(await crew.due()) == 2


async def test_a_full_stages_stream_loses_nothing(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_module, "MOST_BACKOFF_S", 0.05)
    config = (await crew.bus.stream_info(subjects.STAGES))["config"]
    await crew.bus.api("STREAM.UPDATE.STAGES", config | {"max_bytes": 4_000})
    await crew.submit(noop("t", 20), noop("u", 20))
    async with admitting(crew, full=1.0):
        while len(await crew.due()) < 5:  # noqa: ASYNC110 - admit is at work meanwhile
            await asyncio.sleep(0.02)
        assert await tasks_left(crew.bus) > 0
        await crew.bus.api("STREAM.UPDATE.STAGES", config)
        await nothing_left(crew.bus)
    assert await crew.due() == ["stage.init.none.r"] * 40
    assert await crew.letters() == []


async def test_stop_leaves_what_was_not_let_in(crew: Any) -> None:
    await crew.submit(*(noop(f"t{number}", 4) for number in range(40)))
    async with admitting(crew, window=4) as stop:
        await crew.until(crew.due)
        stop.set()
    let_in = len(await progress(crew.bus))
    assert await tasks_left(crew.bus) == 40 - let_in
    assert len(await crew.due()) == 4 * let_in
    async with admitting(crew):
        await nothing_left(crew.bus)
    assert len(await crew.due()) == 160
