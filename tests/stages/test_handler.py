"""Handlers: a class of the user's own in place of a stage's work, under the stage's rules."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.consumer import Ack
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.rollout import AgentResult, RolloutState
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, HookSpec, Task, Timeouts
from rollyard.stages.handler import HandlerContext, as_result, find_handler, open_handler
from rollyard.stages.init import Init
from rollyard.stages.plugin_check import check_task
from rollyard.stages.run import Run
from rollyard.stages.stage import StageFailed, StageHandler

COMMAND = AgentSpec(harness="command", args={"command": ["sh", "-c", "echo by the agent"]})


def name(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def task(kind: type, **fields: Any) -> Task:
    return Task(**{"prompt": "p", "id": "t", "agent": COMMAND, "handler": name(kind), **fields})


async def initialized(crew: Any, wanted: Task) -> RolloutState:
    state = await crew.start(wanted)
    (held,) = await crew.take("init", wanted.sandbox.backend)
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    await held.ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


async def ran(crew: Any, wanted: Task) -> RolloutState:
    state = await initialized(crew, wanted)
    assert state.position == "run", state.failure
    (held,) = await crew.take("run", state.place)
    assert await StageHandler(crew.context, Run(crew.context))(held) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


async def result_of(crew: Any, state: RolloutState) -> AgentResult:
    result: AgentResult = (await crew.life(state.rollout))[-1].result
    return result


class Own:
    """All of INIT and RUN by itself."""

    async def init(self, context: HandlerContext) -> Any:
        assert context.sandbox is not None
        await context.sandbox.put_files({"made": "by the handler"})
        return {"number": 4, "list": (1, 2)}

    async def run(self, context: HandlerContext) -> Any:
        assert context.sandbox is not None
        made = await context.sandbox.read_file("made", 100)
        assert made is not None
        assert context.api_key
        answer = f"{made.decode()} {context.carried} {context.attempt}"
        return {"answer": answer, "metrics": {"steps": 3.0}}


async def test_it_does_the_work_and_carries_plain_values_on(crew: Any) -> None:
    setup = SandboxSpec(files={"not": "written"}, setup=("exit 1",))
    state = await ran(crew, task(Own, sandbox=setup))
    assert (state.position, state.status) == ("eval", "completed")
    assert state.carried == {"number": 4, "list": [1, 2]}
    result = await result_of(crew, state)
    assert result.answer == "by the handler {'number': 4, 'list': [1, 2]} 1"
    assert result.metrics == {"steps": 3.0}
    key = subjects.session_key("r", state.rollout.rollout_id, 1)
    assert await Bucket(crew.bus, subjects.SESSIONS, Any).get(key) is not None


class Around:
    """Something around what the stages do themselves; sync where it may be."""

    async def init(self, context: HandlerContext) -> None:
        assert context.default is not None
        await context.default()
        assert context.sandbox is not None
        await context.sandbox.put_files({"more": "x"})

    async def run(self, context: HandlerContext) -> AgentResult:
        assert context.default is not None
        result: AgentResult = await context.default()
        return structs.replace(result, answer=result.answer + " and the handler")


async def test_it_may_do_what_the_stage_does_and_more(crew: Any) -> None:
    state = await ran(crew, task(Around, sandbox=SandboxSpec(files={"a": "b"})))
    assert state.sandbox is not None
    work = Path(state.sandbox.handle) / "work"
    assert {path.name for path in work.iterdir()} == {"a", "more"}
    assert (await result_of(crew, state)).answer == "by the agent and the handler"


class Sync:
    def run(self, context: HandlerContext) -> str:
        time.sleep(0.05)
        return "from a thread"


async def test_a_part_of_it_and_a_sync_one(crew: Any) -> None:
    state = await ran(crew, task(Sync, sandbox=SandboxSpec(setup=("touch done",))))
    assert (await result_of(crew, state)).answer == "from a thread"


async def test_it_is_found_by_the_source_of_the_data(crew: Any) -> None:
    worker = structs.replace(crew.config.worker, handlers=(f"maths={name(Sync)}", f"other = {name(Own)}"))
    config = crew.context.config = structs.replace(crew.config, worker=worker)
    assert find_handler(config, Task(prompt="p")) is None
    for source, expected in (("maths", Sync), ("other", Own)):
        found = find_handler(config, Task(prompt="p", data_source=source))
        assert found is not None
        assert found.name == name(expected)
    own = find_handler(config, Task(prompt="p", data_source="maths", handler=name(Own)))
    assert own is not None
    assert own.name == name(Own)
    state = await ran(crew, Task(prompt="p", id="t", agent=COMMAND, data_source="maths"))
    assert (await result_of(crew, state)).answer == "from a thread"


# --- the stage's rules ---


class Slow:
    async def init(self, context: HandlerContext) -> None:
        await asyncio.sleep(context.task.metadata.get("init_s", 0))

    async def run(self, context: HandlerContext) -> None:
        await asyncio.sleep(context.task.metadata.get("run_s", 0))


async def test_its_time_is_that_of_the_stage(crew: Any) -> None:
    limits = Timeouts(init_s=0.3, run_s=0.3)
    late = await initialized(crew, task(Slow, metadata={"init_s": 60}, timeouts=limits, max_attempts=1))
    assert late.failure is not None
    assert (late.failure.kind, late.position) == ("init", "aggregate")
    assert "0.3 s" in late.failure.message
    assert await crew.context.backends["local"].list_owned() == []


async def test_a_run_of_it_that_is_late_is_truncated(crew: Any) -> None:
    state = await ran(crew, task(Slow, metadata={"run_s": 60}, timeouts=Timeouts(run_s=0.3)))
    assert (state.position, state.status) == ("eval", "truncated")
    assert state.failure is not None
    assert state.failure.kind == "agent_budget"


async def test_a_cancel_ends_it(crew: Any) -> None:
    state = await initialized(crew, task(Slow, metadata={"run_s": 60}))
    (held,) = await crew.take("run", state.place)
    working = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(held))
    await asyncio.sleep(0.2)
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(subjects.cancel_key("r", "t"), Cancel(reason="enough"))
    assert await working == Ack()
    assert (await crew.state(state.rollout)).status == "cancelled"


class Broken:
    def init(self, context: HandlerContext) -> Any:
        match context.task.metadata["what"]:
            case "raise":
                raise KeyError("x")
            case "large":
                return "x" * 10_000
            case "odd":
                return object()
            case "says":
                raise StageFailed(Failure.of("infra", "the service is away"))


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("raise", "init", "init of the handler"),
        ("large", "init", "has 10,002 bytes, the limit is 8,192"),
        ("odd", "init", "cannot be kept"),
        ("says", "infra", "the service is away"),
    ],
)
async def test_its_failures_are_data_of_the_stages_class(crew: Any, what: str, kind: str, says: str) -> None:
    state = await initialized(crew, task(Broken, metadata={"what": what}, max_attempts=1))
    assert state.failure is not None
    assert state.failure.kind == kind
    assert says in state.failure.message
    assert await crew.context.backends["local"].list_owned() == []


class BrokenRun:
    def run(self, context: HandlerContext) -> Any:
        if context.task.metadata["what"] == "raise":
            raise ValueError("oh no")
        return 17


@pytest.mark.parametrize("what", ["raise", "return"])
async def test_a_broken_run_is_the_agents_failure(crew: Any, what: str) -> None:
    state = await ran(crew, task(BrokenRun, metadata={"what": what}))
    assert state.failure is not None
    assert (state.position, state.failure.kind) == ("aggregate", "agent")


async def test_hooks_go_around_it(crew: Any) -> None:
    hooks = (HookSpec(hook="wall_clock", args={"limit_s": 60}),)
    state = await ran(crew, task(Sync, hooks=hooks))
    assert (await result_of(crew, state)).metrics["wall_s"] >= 0.05


async def test_it_needs_no_sandbox(crew: Any) -> None:
    agent = AgentSpec(harness="noop")
    state = await ran(crew, task(Sync, agent=agent, sandbox=SandboxSpec(backend="none")))
    assert (await result_of(crew, state)).answer == "from a thread"


# --- what is acceptable ---


class Nothing:
    pass


class Picky:
    def __init__(self, needed: int) -> None: ...

    def run(self, context: HandlerContext) -> None: ...


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (name(Nothing), "has none of init, run and eval"),
        (name(Picky), "cannot be made"),
        ("no.such:Thing", "handler: the handler 'no.such:Thing' cannot be loaded"),
        ("moon", "handler: no handler is called 'moon'"),
    ],
)
def test_one_that_cannot_work_is_refused(handler: str, says: str) -> None:
    (problem,) = check_task(Task(prompt="p", handler=handler))
    assert problem.startswith("handler: ")
    assert says in problem
    with pytest.raises(TaskError):
        open_handler(handler)


def test_what_run_may_return() -> None:
    assert as_result(None) == AgentResult(exit_code=0)
    assert as_result("x").answer == "x"
    assert as_result({"exit_code": 3}).exit_code == 3
    failed = as_result({"failure": {"kind": "llm", "message": "no model"}})
    assert failed.failure == Failure(kind="llm", message="no model")
    for value in (3, {"answer": 4}, [1]):
        with pytest.raises(StageFailed, match="is no result"):
            as_result(value)
