"""RUN: the agent's work seen to its end, once, whoever watches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import structs

from rollyard.gateway.keys import verify
from rollyard.pipeline.codec import encode
from rollyard.pipeline.config import Config
from rollyard.pipeline.consumer import Ack
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pull import Delivered
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.rollout import AgentResult, CloseSession, RolloutState
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, HookSpec, Task, Timeouts
from rollyard.stages import collection
from rollyard.stages.hook import HookContext, Veto
from rollyard.stages.init import Init
from rollyard.stages.run import Run
from rollyard.stages.sandbox import ProcessEnd
from rollyard.stages.stage import StageHandler, now_ms
from rollyard.stages.watch import Watch


def with_worker(config: Config, **changes: Any) -> Config:
    return structs.replace(config, worker=structs.replace(config.worker, **changes))


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


# --- what is kept ---


def artifacts(crew: Any, event: Any) -> dict[str, bytes]:
    return {each.name: crew.bus.blobs.get(each.blob) for each in event.result.artifacts}


async def test_logs_and_outputs_are_kept(crew: Any) -> None:
    script = (
        "echo out; echo err >&2; mkdir -p res/deep; echo 1 > res/a.json; echo 2 > res/deep/b.json; echo 3 > res/c.txt;"
        "ln -s /etc/passwd res/link.json; ln -s /etc res/etc; mkfifo res/pipe.json;"
        "echo top > report; echo 'x y' > 'a b'"
    )
    outputs = ("res/**/*.json", "report", "a b", "not/there")
    state = await ran(crew, shell(script, outputs=outputs))
    event = (await crew.life(state.rollout))[-1]
    assert artifacts(crew, event) == {
        "stdout.log": b"out\n",
        "stderr.log": b"err\n",
        "res/a.json": b"1\n",
        "res/deep/b.json": b"2\n",
        "report": b"top\n",
        "a b": b"x y\n",
    }
    assert event.result.metadata == {}


async def test_a_link_out_of_the_sandbox_is_not_followed(crew: Any) -> None:
    state = await ran(crew, shell("ln -s /etc/passwd link; ln -s /etc etc", outputs=("link", "etc/passwd", "etc/*")))
    result = (await crew.life(state.rollout))[-1].result
    assert result.artifacts == ()
    assert [text.partition(":")[0] for text in result.metadata["not_kept"]] == ["link", "etc/passwd"]


async def test_what_is_kept_has_limits(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_FILES", 3)
    monkeypatch.setattr(crew.context, "config", with_worker(crew.config, keep_output_bytes=1000))
    script = (
        "head -c 5000 /dev/zero | tr '\\0' x; printf end; for n in 1 2 3 4 5; do head -c 9000000 /dev/zero > f$n; done"
    )
    state = await ran(crew, shell(script, outputs=("f*",)))
    result = (await crew.life(state.rollout))[-1].result
    assert artifacts(crew, (await crew.life(state.rollout))[-1])["stdout.log"].endswith(b"xend")
    sizes = {each.name: (each.size_bytes, each.truncated) for each in result.artifacts}
    assert sizes == {"stdout.log": (1000, True)} | {f"f{n}": (8 << 20, True) for n in (1, 2, 3)}
    assert result.metadata == {"not_kept": ["f*: 2 of 5 files"]}


async def test_what_a_failed_agent_left_is_kept_too(crew: Any) -> None:
    state = await ran(crew, shell("echo why >&2; echo half > out; exit 3", outputs=("out",)))
    event = (await crew.life(state.rollout))[-1]
    assert (state.position, event.kind) == ("aggregate", "failed")
    assert artifacts(crew, event) == {"stderr.log": b"why\n", "out": b"half\n"}
    assert event.result.exit_code == 3


async def test_partial_results_at_the_deadline(crew: Any) -> None:
    script = "echo half > out; trap '' TERM; echo said; sleep 60"
    state = await ran(crew, shell(script, outputs=("out",), timeouts=Timeouts(run_s=0.6)))
    event = (await crew.life(state.rollout))[-1]
    assert (state.status, event.result.answer) == ("truncated", "said")
    assert artifacts(crew, event) == {"stdout.log": b"said\n", "out": b"half\n"}


async def test_the_diff_is_kept_where_somebody_asks_for_it(crew: Any) -> None:
    task = shell("echo new > file", sandbox=SandboxSpec(files={"old": "x"}), hooks=(HookSpec(hook="git_diff"),))
    state = await ran(crew, task)
    event = (await crew.life(state.rollout))[-1]
    assert b"+new" in artifacts(crew, event)["changes.diff"]
    assert event.result.metrics == {"diff_files": 1, "diff_added": 1, "diff_removed": 0}


async def test_no_change_is_an_empty_diff(crew: Any) -> None:
    task = shell("true", evaluation=EvaluationSpec(skip=("empty_diff",)))
    state = await ran(crew, task)
    assert artifacts(crew, (await crew.life(state.rollout))[-1]) == {"changes.diff": b""}


# --- budgets ---


async def test_an_idle_agent_is_ended(crew: Any) -> None:
    agent = AgentSpec(harness="command", args={"command": ["sh", "-c", "echo begun; sleep 60"]}, max_idle_s=0.8)
    state = await ran(crew, Task(prompt="p", id="t", agent=agent))
    assert (state.position, state.status) == ("eval", "truncated")
    assert state.failure is not None
    assert state.failure.kind == "agent_budget"
    assert state.failure.message == "idle: no model call and no output for 0.8 s"
    assert (await crew.life(state.rollout))[-1].result.answer == "begun"


async def test_output_keeps_an_agent_from_being_idle(crew: Any) -> None:
    script = "for n in 1 2 3 4 5 6; do echo .; sleep 0.3; done"
    agent = AgentSpec(harness="command", args={"command": ["sh", "-c", script]}, max_idle_s=1.0)
    state = await ran(crew, Task(prompt="p", id="t", agent=agent))
    assert state.status == "completed"


async def log_call(crew: Any, state: RolloutState, number: int, *, ended: bool = True, tokens: int = 4) -> None:
    same = {"call_id": f"c{number}", "run": "r", "rollout_id": state.rollout.rollout_id, "attempt": state.attempt}
    subject = subjects.log_subject("r", state.rollout.rollout_id, "call")
    at_ms = now_ms()
    await crew.bus.publish(subject, encode(CallIntent(gateway="g", at_ms=at_ms, latest_end_ms=at_ms + 60_000, **same)))
    if ended:
        call = {"function": {"name": "bash", "arguments": f'{{"command": "rm {number}"}}'}}
        end = CallEnd(
            at_ms=at_ms,
            status="ok",
            completion_ids=TokenIds.of(range(tokens)),
            reply={"role": "assistant", "content": None, "tool_calls": [call]},
            **same,
        )
        await crew.bus.publish(subject, encode(end))


async def test_a_call_on_its_way_keeps_an_agent_from_being_idle(crew: Any) -> None:
    agent = AgentSpec(harness="command", args={"command": ["sleep", "1.6"]}, max_idle_s=0.8)
    state, due = await ready(crew, Task(prompt="p", id="t", agent=agent))
    await log_call(crew, state, 1, ended=False)
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    assert (await crew.state(state.rollout)).status == "completed"


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_calls": 2}, "used up its 2 calls"),
        ({"max_tokens": 8}, "used up its 8 tokens"),
        ({"max_wall_s": 0.05}, "used up its 0.05 s"),
        ({"max_calls": 3, "max_tokens": 9, "max_wall_s": 60}, ""),
        ({}, ""),
    ],
)
async def test_an_agent_that_fails_since_its_budget_is_used_up_is_truncated(
    crew: Any, limits: dict[str, Any], says: str
) -> None:
    agent = AgentSpec(harness="command", args={"command": ["sh", "-c", "sleep 0.1; exit 1"]}, **limits)
    state, due = await ready(crew, Task(prompt="p", id="t", agent=agent))
    for number in range(2):
        await log_call(crew, state, number)
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    after = await crew.state(state.rollout)
    assert after.failure is not None
    assert (after.failure.kind, after.position) == (("agent_budget", "eval") if says else ("agent", "aggregate"))
    assert says in after.failure.message


async def test_the_reason_of_a_kill_outlives_the_worker(crew: Any) -> None:
    """A worker that kills an idle agent, and dies before it says why."""
    state, due = await ready(crew, shell("sleep 60"))
    assert state.sandbox is not None
    sandbox = await crew.context.backends["local"].open(state.sandbox)
    first = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(due))

    async def started() -> bool:
        return (Path(state.sandbox.handle) / "control/agent/pid").exists()  # type: ignore[union-attr]

    await crew.until(started)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await Watch(crew.bus, sandbox, state.rollout).end("idle: as the first worker saw it")
    assert await StageHandler(crew.context, Run(crew.context))(replace(due, deliveries=2)) == Ack()
    after = await crew.state(state.rollout)
    assert after.failure is not None
    assert (after.failure.kind, after.failure.message) == ("agent_budget", "idle: as the first worker saw it")


@pytest.mark.parametrize(("kind", "believed"), [("agent_budget", True), ("cancelled", False), ("llm", False)])
async def test_an_agent_can_say_of_its_kill_no_more_than_a_budget_does(crew: Any, kind: str, believed: bool) -> None:
    state, _ = await ready(crew, shell("true"))
    sandbox = await crew.context.backends["local"].open(state.sandbox)
    await sandbox.put_files({".rollyard/ended": f'{{"kind":"{kind}","message":"planted"}}'}, base="home")
    failure = await Watch(crew.bus, sandbox, state.rollout).why(ProcessEnd(None, "killed"), shell("true"))
    assert failure is not None
    assert failure.kind == ("agent_budget" if believed else "infra")


# --- hooks around it ---


class Diary:
    """Writes its calls to a file, so that several processes could."""

    def __init__(self, path: str, veto: str = "") -> None:
        self.path, self.veto = Path(path), veto

    def _note(self, step: str, context: HookContext) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {context.attempt} {'attached' if context.attached else ''}".strip() + "\n")
        if step == self.veto:
            raise Veto("agent", f"{step} says no", "ask again")

    def setup(self, context: HookContext) -> None:
        self._note("setup", context)

    def before_run(self, context: HookContext) -> None:
        self._note("before_run", context)

    def after_run(self, context: HookContext, result: AgentResult) -> None:
        self._note("after_run", context)

    def on_error(self, context: HookContext, failure: Failure) -> None:
        self._note(f"on_error {failure.kind}", context)

    def cleanup(self, context: HookContext) -> None:
        self._note("cleanup", context)


def diary(path: Path, **args: Any) -> HookSpec:
    return HookSpec(hook=f"{__name__}:Diary", args={"path": str(path), **args})


async def test_hooks_see_an_attempt_from_its_start_to_its_end(crew: Any, tmp_path: Path) -> None:
    await ran(crew, shell("true", hooks=(diary(tmp_path / "diary"),)))
    assert (tmp_path / "diary").read_text().split("\n")[:-1] == [
        "setup 1",
        "before_run 1",
        "after_run 1",
        "cleanup 1",
    ]


async def test_the_hooks_of_the_configuration_are_called_too(crew: Any, tmp_path: Path) -> None:
    crew.context.config = with_worker(crew.config, hooks=(diary(tmp_path / "common"),))
    await ran(crew, shell("true", hooks=(diary(tmp_path / "own"),)))
    assert (tmp_path / "common").read_text() == (tmp_path / "own").read_text() != ""


@pytest.mark.parametrize(("step", "agent_ran"), [("before_run", False), ("after_run", True)], ids=["before", "after"])
async def test_a_veto_ends_the_attempt(crew: Any, tmp_path: Path, step: str, agent_ran: bool) -> None:
    task = shell(f"touch {tmp_path}/ran", hooks=(diary(tmp_path / "diary", veto=step),))
    state = await ran(crew, task)
    assert state.failure is not None
    assert (state.position, state.failure.kind, state.failure.message) == ("aggregate", "agent", f"{step} says no")
    assert (tmp_path / "ran").exists() == agent_ran
    assert "on_error agent 1\ncleanup 1\n" in (tmp_path / "diary").read_text()
    assert await crew.context.backends["local"].list_owned() == []


async def test_an_agent_that_fails_is_told_to_hooks(crew: Any, tmp_path: Path) -> None:
    await ran(crew, shell("exit 3", hooks=(diary(tmp_path / "diary"),)))
    assert (tmp_path / "diary").read_text().split("\n")[2:-1] == ["after_run 1", "on_error agent 1", "cleanup 1"]


async def test_a_second_run_does_not_prepare_a_second_time(crew: Any, tmp_path: Path) -> None:
    go_on, book = tmp_path / "go-on", tmp_path / "diary"
    task = shell(f"until [ -e {go_on} ]; do sleep 0.05; done", hooks=(diary(book),))
    state, due = await ready(crew, task)
    first = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(due))

    async def started() -> bool:
        return (Path(state.sandbox.handle) / "control/agent/pid").exists()  # type: ignore[union-attr]

    await crew.until(started)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go_on.touch()
    assert await StageHandler(crew.context, Run(crew.context))(replace(due, deliveries=2)) == Ack()
    assert book.read_text().split("\n")[:-1] == [
        "setup 1",
        "before_run 1",
        "cleanup 1",  # the worker stopped, and the agent went on
        "setup 1",
        "after_run 1 attached",
        "cleanup 1 attached",
    ]


async def test_a_cancelled_rollout_is_told_to_hooks(crew: Any, tmp_path: Path) -> None:
    state, due = await ready(crew, shell("sleep 60", hooks=(diary(tmp_path / "diary"),)))
    running = asyncio.create_task(StageHandler(crew.context, Run(crew.context))(due))

    async def prepared() -> bool:
        return (tmp_path / "diary").exists() and "before_run" in (tmp_path / "diary").read_text()

    await crew.until(prepared)
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(subjects.cancel_key("r", "t", 0), Cancel(reason="enough"))
    assert await running == Ack()
    assert (await crew.state(state.rollout)).status == "cancelled"
    assert (tmp_path / "diary").read_text().endswith("on_error cancelled 1\ncleanup 1\n")


class Hanging:
    """Stands still in a thread for longer than its limit."""

    timeout_s = 0.5

    def before_run(self, context: HookContext) -> None:
        import time  # noqa: PLC0415

        time.sleep(3)


async def test_a_hook_that_hangs_holds_up_no_heartbeat(crew: Any) -> None:
    beats: list[float] = []
    state, due = await ready(crew, shell("true", hooks=(HookSpec(hook=f"{__name__}:Hanging"),)))

    async def beat() -> None:
        while True:
            beats.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    beating.cancel()
    assert max(later - earlier for earlier, later in pairwise(beats)) < 0.45
    result = (await crew.life(state.rollout))[-1].result
    assert result.metrics == {"hook_failures": 1}
    assert result.metadata["hook_failures"][0]["error"] == "it took longer than 0.5 s"


# --- the shipped hooks, on a real agent ---


async def test_logs_and_artifacts(crew: Any) -> None:
    script = "echo out; mkdir $HOME/.agent; echo log > $HOME/.agent/a.log; mkdir d; echo x > d/x.txt"
    hooks = (
        HookSpec(hook="logs", args={"paths": [".agent/*.log"]}),
        HookSpec(hook="artifacts", args={"paths": ["d/*"]}),
    )
    state = await ran(crew, shell(script, hooks=hooks))
    kept = artifacts(crew, (await crew.life(state.rollout))[-1])
    assert kept == {"stdout.log": b"out\n", "home/.agent/a.log": b"log\n", "d/x.txt": b"x\n"}


async def test_a_wall_clock_ends_the_agent_and_keeps_what_there_is(crew: Any) -> None:
    state = await ran(crew, shell("echo half; sleep 60", hooks=(HookSpec(hook="wall_clock", args={"limit_s": 0.5}),)))
    assert (state.position, state.status) == ("eval", "truncated")
    assert state.failure is not None
    assert state.failure.message == "the hook wall_clock ended the agent after 0.5 s"
    result = (await crew.life(state.rollout))[-1].result
    assert result.answer == "half"
    assert result.metrics["wall_s"] >= 0.5


async def test_the_audit_shows_what_the_model_asked_for(crew: Any) -> None:
    hook = HookSpec(hook="command_audit", args={"flag": ["rm 1"]})
    state, due = await ready(crew, shell("true", hooks=(hook,)))
    for number in range(2):
        await log_call(crew, state, number)
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    event = (await crew.life(state.rollout))[-1]
    lines = [msgspec.json.decode(line) for line in artifacts(crew, event)["commands.jsonl"].splitlines()]
    assert [(line["name"], line["arguments"], line.get("flags")) for line in lines] == [
        ("bash", '{"command": "rm 0"}', None),
        ("bash", '{"command": "rm 1"}', ["rm 1"]),
    ]
    assert event.result.metrics == {"tool_calls": 2, "flagged_calls": 1}


async def test_the_audit_may_end_the_attempt(crew: Any) -> None:
    hook = HookSpec(hook="command_audit", args={"flag": ["rm"], "on_flag": "fail"})
    state, due = await ready(crew, shell("true", hooks=(hook,)))
    await log_call(crew, state, 0)
    assert await StageHandler(crew.context, Run(crew.context))(due) == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.failure.kind) == ("aggregate", "agent")
    assert "1 tool calls are not allowed" in after.failure.message


class Receiver:
    """A web service that answers with each of `statuses` in turn, the last one for ever."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.got: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.url = ""

    async def __aenter__(self) -> Receiver:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/private-path"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.got.append((dict(request.headers), await request.json()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"Location": self.url} if status == 302 else {})


async def test_a_webhook_tells_the_end_and_tries_again(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    async with Receiver(503, 200) as receiver:
        hook = HookSpec(hook="webhook", args={"url": receiver.url, "token_env": "MY_TOKEN"})
        state = await ran(crew, shell("echo 42", hooks=(hook,)))
    headers, body = receiver.got[1]
    assert len(receiver.got) == 2
    assert headers["Authorization"] == "Bearer very-secret"
    assert headers["Idempotency-Key"] == f"{state.rollout.rollout_id}.1.ran"
    assert (body["event"], body["status"], body["answer"], body["task_id"]) == ("ran", "completed", "42", "t")
    result = (await crew.life(state.rollout))[-1].result
    assert result.metrics == {}
    assert "very-secret" not in str(result) + str(body)


@pytest.mark.parametrize(("status", "tries"), [(500, 2), (404, 1), (302, 1)])
async def test_a_webhook_that_is_refused_is_told_without_its_secrets(
    crew: Any, monkeypatch: pytest.MonkeyPatch, status: int, tries: int
) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    async with Receiver(status) as receiver:
        args = {"url": receiver.url + "?key=hidden", "token_env": "MY_TOKEN", "max_tries": 2}
        state = await ran(crew, shell("true", hooks=(HookSpec(hook="webhook", args=args),)))
    assert len(receiver.got) == tries
    result = (await crew.life(state.rollout))[-1].result
    assert result.metrics == {"hook_failures": 1}
    said = str(result.metadata)
    assert f"127.0.0.1 did not take it: HTTP {status}" in said
    assert "hidden" not in said
    assert "very-secret" not in said
    assert "private-path" not in said


async def test_a_webhook_tells_of_failures(crew: Any) -> None:
    async with Receiver(200) as receiver:
        await ran(crew, shell("exit 4", hooks=(HookSpec(hook="webhook", args={"url": receiver.url}),)))
    ((_, body),) = receiver.got
    assert (body["event"], body["status"], body["failure"]["kind"]) == ("failed", "failed", "agent")
