"""A harness of the user's own: whatever it raises or returns ends as `init` or `agent`, and never as a hang."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from rollyard.harnesses.harness import Command, Needs, open_harness
from rollyard.pipeline.consumer import Ack
from rollyard.schemas.errors import HarnessError
from rollyard.schemas.rollout import AgentResult, RolloutState
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task, Timeouts
from rollyard.stages import bounded, checked_harness
from rollyard.stages.init import Init
from rollyard.stages.run import Run
from rollyard.stages.stage import StageHandler

WAYS: dict[str, Any] = {
    "raises": ValueError("oh no"),
    "is late by itself": TimeoutError("of its own"),
    "wants to end the process": SystemExit(3),
    "refuses": HarnessError("as it likes", hint="do so"),
    "none": None,
    "text": "text",
    "a number as a file": {"a": 5},
    "no unicode": {"a": "\ud800"},
    "one line": Command("ls -l"),  # type: ignore[arg-type]
    "a number as a variable": Command(("true",), {"N": 5}),  # type: ignore[dict-item]
    "a NUL": Command(("echo", "a\0b")),
    "a broken result": AgentResult(exit_code=0, answer=5),  # type: ignore[arg-type]
    "a number as a bundle": Needs(bundle=5),  # type: ignore[arg-type]
}


def done(args: Any, member: str, good: Any) -> Any:
    """What the member of a harness does, as the arguments say; what is good, where they say nothing."""
    value = WAYS[args[member]] if member in args else good
    if isinstance(value, BaseException):
        raise value
    return value


class Own:
    """A harness that does what its arguments say."""

    name = "own"
    in_process = False

    def validate_args(self, args: Any) -> None: ...

    def needs(self, args: Any) -> Any:
        return done(args, "needs", Needs())

    def files(self, context: Any) -> Any:
        return done(context.task.agent.args, "files", {"a": "b"})

    def command(self, context: Any) -> Any:
        return done(context.task.agent.args, "command", Command(("echo", "said")))

    async def result(self, context: Any, exit_code: Any, stdout: bytes, stderr: bytes, read: Any) -> Any:
        return done(context.task.agent.args, "result", AgentResult(exit_code=exit_code, answer="42"))


class Hanging(Own):
    """Its `result` never returns, and does not end before the test when it is stubborn."""

    def __init__(self) -> None:
        self.test_is_over, self.ended = asyncio.Event(), asyncio.Event()

    async def result(self, context: Any, *_: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            while "stubborn" in context.task.agent.args and not self.test_is_over.is_set():
                with suppress(asyncio.CancelledError):
                    await self.test_is_over.wait()
            self.ended.set()


class Counting(Own):
    """It tells how far the agent is; what it makes of the end goes before."""

    def progress(self, stdout: bytes, stderr: bytes) -> Any:
        return {"words": len(stdout.split()), "turns": 1}

    async def result(self, context: Any, exit_code: Any, *_: Any) -> Any:
        return AgentResult(exit_code=exit_code, metrics={"turns": 2.0})


class Confused(Own):
    """Its progress is no number."""

    def progress(self, stdout: bytes, stderr: bytes) -> Any:
        return {"words": float("nan")}


class Plain(Own):
    """Its `result` is not async."""

    def result(self, *_: Any) -> Any:  # type: ignore[override]
        return AgentResult(exit_code=0, answer="plain")


class Inside(Own):
    """It works in the worker."""

    in_process = True

    def files(self, context: Any) -> Any:
        return {}

    async def work(self, context: Any) -> Any:
        return done(context.task.agent.args, "work", AgentResult(exit_code=0, answer="42"))


class Unmakable(Own):
    """It cannot be made."""

    def __init__(self) -> None:
        raise KeyError("MY_TOKEN")


def task(harness: type[Own] = Own, backend: str = "local", **args: str) -> Task:
    agent = AgentSpec(harness=f"{__name__}:{harness.__name__}", args=args)
    sandbox = SandboxSpec(backend=backend)
    return Task(prompt="p", id="t", agent=agent, sandbox=sandbox, max_attempts=1, timeouts=Timeouts(run_s=30))


async def initialized(crew: Any, what: Task) -> RolloutState:
    state = await crew.start(what)
    (held,) = await crew.take("init", what.sandbox.backend)
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    await held.ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


async def ran(crew: Any, what: Task) -> RolloutState:
    state = await initialized(crew, what)
    assert state.position == "run", state.failure
    (held,) = await crew.take("run", state.place)
    assert await StageHandler(crew.context, Run(crew.context))(held) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


def check(state: RolloutState, kind: str, message: str) -> None:
    assert (state.position, state.status) == ("aggregate", "failed")
    assert state.failure is not None
    assert state.failure.kind == kind
    assert message in state.failure.message
    assert state.failure.hint


RAISED = [
    ("raises", f"of the harness '{__name__}:Own' raised ValueError: oh no"),
    ("is late by itself", "raised TimeoutError: of its own"),
    ("wants to end the process", "raised SystemExit: 3"),
    ("refuses", "as it likes"),
    ("none", "returned None"),
    ("text", "returned 'text'"),
]


@pytest.mark.parametrize(
    ("member", "way", "message"),
    [
        *(("needs", way, message) for way, message in RAISED),
        *(("files", way, message) for way, message in RAISED),
        ("files", "a number as a file", "returned {'a': 5}"),
        ("files", "no unicode", "surrogates not allowed"),
        ("needs", "a number as a bundle", "returned Needs(bundle=5"),
    ],
)
async def test_what_init_asks_of_it(crew: Any, member: str, way: str, message: str) -> None:
    state = await initialized(crew, task(**{member: way}))
    check(state, "init", message)
    assert state.failure is not None
    assert way == "refuses" or state.failure.message.startswith(f"{member} of the harness")
    assert await crew.context.backends["local"].list_owned() == []


async def test_one_that_cannot_be_made(crew: Any) -> None:
    check(await initialized(crew, task(Unmakable)), "init", f"'{__name__}:Unmakable' raised KeyError: 'MY_TOKEN'")


@pytest.mark.parametrize(
    ("member", "way", "message"),
    [
        *(("command", way, message) for way, message in RAISED),
        *(("result", way, message) for way, message in RAISED if way != "wants to end the process"),
        ("result", "wants to end the process", "SystemExit(3)"),
        ("command", "one line", "returned Command(argv='ls -l'"),
        ("command", "a number as a variable", "returned Command("),
        ("command", "a NUL", "holds a NUL"),
        ("result", "a broken result", "Expected `str`, got `int`"),
    ],
)
async def test_what_run_asks_of_it(crew: Any, member: str, way: str, message: str) -> None:
    state = await ran(crew, task(**{member: way}))
    check(state, "agent", message)
    assert state.failure is not None
    assert way == "refuses" or state.failure.message.startswith(f"{member} of the harness")
    assert await crew.context.backends["local"].list_owned() == []


async def test_what_the_agent_wrote_is_kept_though_its_result_cannot_be_read(crew: Any) -> None:
    state = await ran(crew, task(result="raises"))
    result = (await crew.life(state.rollout))[-1].result
    assert result.exit_code == 0
    assert {each.name: crew.bus.blobs.get(each.blob) for each in result.artifacts} == {"stdout.log": b"said\n"}


@pytest.mark.parametrize("args", [{}, {"stubborn": "yes"}], ids=["it can be cancelled", "it cannot"])
async def test_a_result_that_is_never_read_ends(
    crew: Any, monkeypatch: pytest.MonkeyPatch, args: dict[str, str]
) -> None:
    open_harness.cache_clear()  # it keeps what this test leaves in it
    monkeypatch.setattr(checked_harness, "RESULT_S", 0.3)
    monkeypatch.setattr(bounded, "FAREWELL_S", 0.1)
    state = await ran(crew, task(Hanging, **args))
    check(state, "agent", f"result of the harness '{__name__}:Hanging' took longer than 0.3 s")
    harness: Any = open_harness(f"{__name__}:Hanging")
    harness.test_is_over.set()
    await asyncio.wait_for(harness.ended.wait(), 5)


async def test_a_result_that_is_not_async_counts(crew: Any) -> None:
    state = await ran(crew, task(Plain))
    assert (state.position, (await crew.life(state.rollout))[-1].result.answer) == ("eval", "plain")


async def test_one_that_works_is_left_alone(crew: Any) -> None:
    state = await ran(crew, task())
    assert (state.position, (await crew.life(state.rollout))[-1].result.answer) == ("eval", "42")


@pytest.mark.parametrize("way", ["raises", "is late by itself", "none", "a broken result"])
async def test_one_that_works_in_the_worker(crew: Any, way: str) -> None:
    state = await ran(crew, task(Inside, "none", work=way))
    check(state, "agent", f"work of the harness '{__name__}:Inside'")


async def test_how_far_it_came_is_kept(crew: Any) -> None:
    state = await ran(crew, task(Counting))
    result = (await crew.life(state.rollout))[-1].result
    assert result.metrics == {"words": 1.0, "turns": 2.0}


async def test_progress_that_is_no_number(crew: Any) -> None:
    check(await ran(crew, task(Confused)), "agent", "progress of the harness")
