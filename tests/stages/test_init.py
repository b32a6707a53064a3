"""INIT: a sandbox with everything in it that the agent needs, or a failure as data and nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.codec import decode
from rollyard.pipeline.consumer import Ack
from rollyard.pipeline.handover import Held
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.rollout import RolloutState, StageMessage
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task, Timeouts
from rollyard.stages.init import Init
from rollyard.stages.stage import StageHandler

COMMAND = AgentSpec(harness="command", args={"command": ["true"]})


async def initialize(crew: Any, task: Task, **changes: Any) -> RolloutState:
    """What becomes of a rollout's INIT message; the state after it."""
    state = await crew.start(task, **changes)
    (held,) = await crew.take("init", task.sandbox.backend)
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


async def owned(crew: Any) -> list[Any]:
    return [ref for ref, _ in await crew.context.backends["local"].list_owned()]


async def test_files_commands_and_the_agents_program_are_there(crew: Any) -> None:
    task = Task(
        prompt="What?",
        id="t",
        agent=AgentSpec(harness="ask"),
        sandbox=SandboxSpec(
            files={"src/a.txt": "content"},
            setup=("cat src/a.txt > b.txt", 'echo "$WORD $PWD" > c.txt'),
            env={"WORD": "hello"},
        ),
    )
    state = await initialize(crew, task)
    assert (state.position, state.step, state.attempt, state.effects) == ("run", 1, 1, ())
    sandbox = await crew.context.backends["local"].open(state.sandbox)
    work = Path(sandbox.workdir)
    assert (work / "b.txt").read_text() == "content"
    assert (work / "c.txt").read_text() == f"hello {work}\n"
    assert "What?" in (Path(sandbox.home) / ".rollyard" / "config.json").read_text()
    ((_, labels),) = await crew.context.backends["local"].list_owned()
    assert (labels.run, labels.rollout_id, labels.attempt, labels.owner) == ("r", state.rollout.rollout_id, 1, "w1")
    (event,) = await crew.life(state.rollout)
    assert (event.kind, event.attempt, event.worker, event.place) == ("initialized", 1, "w1", state.place)
    assert 0 < event.started_ms <= event.at_ms
    assert f"stage.run.{state.place}.r" in await crew.due()


@pytest.mark.parametrize(
    ("task", "kind", "says"),
    [
        (
            Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(setup=("true", "echo oh no >&2; exit 3"))),
            "init",
            "setup command 2 ended with 3: oh no",
        ),
        (
            Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(setup=("sleep 60",)), timeouts=Timeouts(init_s=0.3)),
            "init",
            "0.3 s",
        ),
        (
            Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(backend="moon")),
            "infra",
            "has no sandbox backend 'moon'",
        ),
        (
            Task(prompt="p", agent=AgentSpec(harness="ask"), sandbox=SandboxSpec(backend="none")),
            "init",
            "the sandbox backend 'none' has no place for",
        ),
    ],
    ids=["setup", "timeout", "backend", "files"],
)
async def test_a_failure_is_data_that_may_be_retried_and_leaves_no_sandbox(
    crew: Any, task: Task, kind: str, says: str
) -> None:
    state = await initialize(crew, task)
    assert (state.position, state.attempt, state.failure) == ("init", 2, None)
    (event,) = await crew.life(state.rollout)
    assert event.failure is not None
    assert (event.kind, event.failure.kind, event.failure.retryable) == ("failed", kind, True)
    assert says in event.failure.message
    assert await owned(crew) == []


async def test_the_last_attempt_goes_on_to_aggregate(crew: Any) -> None:
    task = Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(setup=("exit 3",)), max_attempts=2)
    state = await initialize(crew, task, attempt=2)
    assert (state.position, state.attempt, state.status) == ("aggregate", 2, "failed")
    assert state.failure is not None
    assert state.failure.hint == "see sandbox.setup"


async def test_a_cancel_ends_it_and_removes_the_sandbox(crew: Any) -> None:
    task = Task(prompt="p", id="t", agent=COMMAND, sandbox=SandboxSpec(setup=("touch started; sleep 60",)))
    state = await crew.start(task)
    (held,) = await crew.take("init", "local")
    working = asyncio.create_task(StageHandler(crew.context, Init(crew.context))(held))
    root = crew.config.sandboxes_dir()

    async def started() -> bool:
        return any(root.glob("*/work/started"))

    await crew.until(started)
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(subjects.cancel_key("r", "t"), Cancel(reason="enough"))
    assert await working == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.status, after.attempt) == ("aggregate", "cancelled", 1)
    assert after.failure.message == "enough"
    assert await owned(crew) == []


async def test_a_worker_that_stops_gives_the_work_back(crew: Any) -> None:
    task = Task(prompt="p", id="t", agent=COMMAND, sandbox=SandboxSpec(setup=("sleep 60",)))
    state = await crew.start(task)
    (held,) = await crew.take("init", "local")
    working = asyncio.create_task(StageHandler(crew.context, Init(crew.context))(held))
    await crew.until(lambda: owned(crew))
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    after = await crew.state(state.rollout)
    assert (after.position, after.step) == ("init", 0)
    assert await owned(crew) == []


async def test_a_sandbox_that_the_state_names_after_all_stays(crew: Any) -> None:
    """A write can be stored though its writer was told that another one won: others have moved the rollout on since."""
    await crew.submit(Task(id="t", prompt="x", agent=AgentSpec(harness="ask")))
    async with crew.at_work("admit"):
        (held,) = await crew.take("init", "local")
    message = decode(await held.body(), StageMessage)
    assert message.state is not None
    init = Init(crew.context)
    state = await init.work(Held(message.state, message.revision, message))
    assert state.sandbox is not None
    states = Bucket(crew.bus, subjects.ROLLOUTS, RolloutState)
    key = subjects.rollout_key(state.rollout.run, state.rollout.rollout_id)
    await states.update(key, structs.replace(state, position="eval", step=state.step + 1), message.revision)
    await init.abandon(state)
    assert Path(state.sandbox.handle).exists()
    other = structs.replace(state, sandbox=structs.replace(state.sandbox, handle=state.sandbox.handle + "x"))
    await states.put(key, other)
    await init.abandon(state)
    assert not Path(state.sandbox.handle).exists()
