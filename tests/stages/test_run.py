"""RUN: the agent's work seen to its end, once, whoever watches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.gateway.keys import verify
from rollyard.pipeline.consumer import Ack
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pull import Delivered
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.rollout import CloseSession, RolloutState
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task, Timeouts
from rollyard.stages.init import Init
from rollyard.stages.run import Run
from rollyard.stages.stage import StageHandler


def shell(script: str, **fields: Any) -> Task:
    return Task(
        prompt="p", id="t", agent=AgentSpec(harness="command", args={"command": ["sh", "-c", script]}), **fields
    )


async def ready(crew: Any, task: Task, **changes: Any) -> tuple[RolloutState, Delivered]:
    """A rollout with its sandbox, and its RUN message."""
    state = await crew.start(task, **changes)
    (held,) = await crew.take("init", task.sandbox.backend)
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    await held.ack()
    after = await crew.state(state.rollout)
    (due,) = await crew.take("run", after.place)
    return after, due


async def ran(crew: Any, task: Task, **changes: Any) -> RolloutState:
    """The state after RUN."""
    state, due = await ready(crew, task, **changes)
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


async def closed(crew: Any, state: RolloutState, attempt: int) -> bool:
    key = subjects.session_key("r", state.rollout.rollout_id, attempt)
    return await Bucket(crew.bus, subjects.SESSIONS, Any).get(key) is not None


async def test_an_agent_ends_its_session_is_closed_and_its_result_logged(crew: Any) -> None:
    task = shell('echo "the answer $OPENAI_MODEL"; echo note >&2', sandbox=SandboxSpec(env={"A": "b"}))
    state = await ran(crew, task)
    assert (state.position, state.status, state.failure) == ("eval", "completed", None)
    assert state.effects == (CloseSession(attempt=1),)
    assert await closed(crew, state, 1)
    stored = await crew.bus.get(subjects.LOG, state.closed_seq)
    assert stored is not None
    event = (await crew.life(state.rollout))[-1]
    assert (event.kind, event.status, event.result.exit_code) == ("ran", "completed", 0)
    assert (event.result.answer, event.result.output_tail) == ("the answer default", "note")
    assert f"stage.eval.{state.place}.r" in await crew.due()


async def test_it_is_given_the_gateways_address_and_a_key_of_its_attempt(crew: Any) -> None:
    state = await ran(crew, shell('echo "$OPENAI_BASE_URL $OPENAI_API_KEY"'))
    url, key = (await crew.life(state.rollout))[-1].result.answer.split()
    assert url == "http://127.0.0.1:8400/v1"
    grant = verify(key, crew.context.secret)
    assert (grant.run, grant.rollout_id, grant.attempt) == ("r", state.rollout.rollout_id, 1)


async def test_a_second_run_attaches_to_the_agent_and_starts_none(crew: Any, tmp_path: Path) -> None:
    ledger, go_on = tmp_path / "ledger", tmp_path / "go-on"
    state, due = await ready(
        crew, shell(f"echo started >> {ledger}; until [ -e {go_on} ]; do sleep 0.05; done; echo ok")
    )
    first = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(due))

    async def started() -> bool:
        return ledger.exists()

    await crew.until(started)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(replace(due, deliveries=2)))
    third = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(replace(due, deliveries=3)))
    go_on.touch()
    outcomes = await asyncio.gather(second, third)
    assert Ack() in outcomes
    assert ledger.read_text() == "started\n"
    after = await crew.state(state.rollout)
    assert (after.position, after.attempt, after.status) == ("eval", 1, "completed")
    assert (await crew.due()).count(f"stage.eval.{after.place}.r") == 1


async def test_a_deadline_truncates(crew: Any) -> None:
    state = await ran(crew, shell("echo half; sleep 60", timeouts=Timeouts(run_s=0.5)))
    assert (state.position, state.status) == ("eval", "truncated")
    assert state.failure is not None
    assert (state.failure.kind, state.failure.hint) == ("agent_budget", "raise timeouts.run_s")
    assert state.failure.message == "the agent was still running after 0.5 s"
    assert (await crew.life(state.rollout))[-1].result.answer == "half"


async def test_an_agent_that_fails_is_not_tried_again(crew: Any) -> None:
    state = await ran(crew, shell("echo broken >&2; exit 7"))
    assert (state.position, state.status, state.attempt) == ("aggregate", "failed", 1)
    assert state.failure is not None
    assert (state.failure.kind, state.failure.retryable) == ("agent", False)
    assert state.failure.message == "the agent ended with exit status 7: broken"
    assert await closed(crew, state, 1)
    assert await crew.context.backends["local"].list_owned() == []


async def test_a_sandbox_that_is_gone_is_infrastructure_and_tried_again(crew: Any) -> None:
    state, due = await ready(crew, shell("true"))
    assert state.sandbox is not None
    await (await crew.context.backends["local"].open(state.sandbox)).destroy()
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.attempt) == ("init", 2)
    failure = (await crew.life(state.rollout))[-1].failure
    assert failure.kind == "infra"
    assert "cannot be started in" in failure.message


async def test_a_cancel_kills_the_agent(crew: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    state, due = await ready(crew, shell(f"echo $$ > {pid_file}; sleep 600"))
    running = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(due))

    async def started() -> bool:
        return pid_file.exists() and bool(pid_file.read_text())

    await crew.until(started)
    key = subjects.cancel_key("r", "t", 0)
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(key, Cancel(reason="enough"))
    assert await running == Ack()
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()
    after = await crew.state(state.rollout)
    assert (after.position, after.status, after.failure.message) == ("aggregate", "cancelled", "enough")
    assert await closed(crew, state, 1)


async def test_an_agent_inside_the_worker_has_the_same_deadline(crew: Any) -> None:
    agent = AgentSpec(harness="noop", args={"sleep_s": 600})
    task = Task(prompt="p", id="t", agent=agent, sandbox=SandboxSpec(backend="none"), timeouts=Timeouts(run_s=0.2))
    state = await ran(crew, task)
    assert (state.position, state.status) == ("eval", "truncated")
    assert state.failure is not None
    assert state.failure.message == "the agent was still running after 0.2 s"


async def test_an_agent_that_is_not_installed_says_how_to_install_it(
    crew: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLYARD_TOOLS", str(tmp_path / "nothing"))
    state = await ran(crew, Task(prompt="p", id="t", agent=AgentSpec(harness="mini_swe_agent")))
    assert (state.position, state.status) == ("aggregate", "failed")
    assert state.failure is not None
    assert "mini-swe-agent is not installed" in state.failure.message
    assert state.failure.hint
