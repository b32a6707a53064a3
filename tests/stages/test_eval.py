"""EVAL: the reward by the task's rule, or none; a rule that does not work is a failure as data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline.client import Client
from rollyard.pipeline.consumer import Ack
from rollyard.schemas import subjects
from rollyard.schemas.errors import EvaluationError, ModelError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task, Timeouts
from rollyard.stages import eval as eval_stage
from rollyard.stages.changes import mark_baseline
from rollyard.stages.eval import Eval
from rollyard.stages.evaluator import Verdict
from rollyard.stages.plugin_check import check_task
from rollyard.stages.sandbox import Labels, Sandbox
from rollyard.stages.stage import StageHandler

Agent = Callable[[Sandbox], Awaitable[Any]]


async def left_by_agent(
    crew: Any, evaluation: EvaluationSpec, answer: str = "42", agent: Agent | None = None, **fields: Any
) -> RolloutState:
    """A rollout whose agent gave an answer, left a file, and did what `agent` does; its message waits for EVAL."""
    harness = AgentSpec(harness="command", args={"command": ["true"]})
    own = {name: fields.pop(name) for name in ("timeouts", "sandbox_spec", "handler") if name in fields}
    spec = own.pop("sandbox_spec", SandboxSpec())
    task = Task(prompt="p", id="t", agent=harness, evaluation=evaluation, sandbox=spec, **own)
    local = crew.context.backends["local"]
    labels = Labels(run="r", rollout_id=subjects.rollout_id("r", "t", 0), attempt=1, owner="w1", created_ms=0)
    sandbox = await local.create(labels)
    await sandbox.put_files(spec.files)
    await mark_baseline(sandbox)
    await sandbox.put_files({"made.txt": "by the agent"})
    if agent is not None:
        await agent(sandbox)
    facts = {"position": "eval", "place": local.place, "sandbox": sandbox.ref, "step": 2, "status": "completed"}
    result = AgentResult(exit_code=0, answer=answer)
    event = RolloutEvent(kind="ran", rollout=Rollout.of("r", "t", 0, 1), attempt=1, at_ms=1, result=result)
    closed_seq = await crew.context.record(event)
    state: RolloutState = await crew.start(task, **(facts | {"closed_seq": closed_seq} | fields))
    return state


async def judged(crew: Any, evaluation: EvaluationSpec, answer: str = "42", **fields: Any) -> RolloutState:
    """What becomes of such a rollout."""
    state = await left_by_agent(crew, evaluation, answer, **fields)
    local = crew.context.backends["local"]
    (held,) = await crew.take("eval", local.place)
    assert await StageHandler(crew.context, Eval(crew.context))(held) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    assert await local.list_owned() == []
    return after


async def verdict(crew: Any, evaluation: EvaluationSpec, **fields: Any) -> RolloutEvent:
    """The event of a rollout that is judged."""
    state = await judged(crew, evaluation, **fields)
    event: RolloutEvent = (await crew.life(state.rollout))[-1]
    assert event.kind == "evaluated", event.failure
    return event


def command(script: str, **args: Any) -> dict[str, Any]:
    return {"command": script, **args}


@pytest.mark.parametrize(
    ("evaluation", "reward"),
    [
        (EvaluationSpec(rule="exact", args={"answer": "42"}), 1.0),
        (EvaluationSpec(rule="exact", args={"answer": "43"}), 0.0),
        (EvaluationSpec(rule="command", args={"command": 'grep -q "by the agent" made.txt'}), 1.0),
        (EvaluationSpec(), None),
    ],
    ids=["right", "wrong", "looks into the sandbox", "no reward"],
)
async def test_a_reward_is_logged_and_the_sandbox_goes(
    crew: Any, evaluation: EvaluationSpec, reward: float | None
) -> None:
    state = await judged(crew, evaluation)
    assert (state.position, state.status, state.failure) == ("aggregate", "completed", None)
    event = (await crew.life(state.rollout))[-1]
    assert (event.kind, event.attempt, event.reward, event.worker) == ("evaluated", 1, reward, "w1")
    stored = await crew.bus.get(subjects.LOG, state.evaluated_seq)
    assert stored is not None
    assert "stage.aggregate.r" in await crew.due()


async def test_rewards_of_turns_are_logged_with_the_reward(crew: Any) -> None:
    verdict = '{"reward": 0.5, "metrics": {"passed": 2}, "turn_rewards": [1, null, -1]}'
    args = {"command": f"echo '{verdict}' >r", "reward_file": "r"}
    state = await judged(crew, EvaluationSpec(rule="command", args=args))
    event = (await crew.life(state.rollout))[-1]
    assert (event.reward, event.metrics, event.turn_rewards) == (0.5, {"passed": 2.0}, (1.0, None, -1.0))


async def test_what_was_truncated_is_judged_and_stays_truncated(crew: Any) -> None:
    late = Failure.of("agent_budget", "too late")
    state = await judged(crew, EvaluationSpec(rule="exact", args={"answer": "42"}), status="truncated", failure=late)
    assert (state.position, state.status, state.failure) == ("aggregate", "truncated", late)
    assert (await crew.life(state.rollout))[-1].reward == 1.0


@pytest.mark.parametrize(
    ("evaluation", "timeouts", "says"),
    [
        (EvaluationSpec(rule="python", args={"entry": "json:dumps"}, max_tries=2), Timeouts(), "json:dumps"),
        (EvaluationSpec(rule="command", args={"command": "sleep 60"}, max_tries=1), Timeouts(eval_s=0.4), "0.4 s"),
    ],
    ids=["a rule that breaks", "a rule that hangs"],
)
async def test_a_rule_that_cannot_judge_fails_the_rollout_without_a_reward(
    crew: Any, evaluation: EvaluationSpec, timeouts: Timeouts, says: str
) -> None:
    state = await judged(crew, evaluation, timeouts=timeouts)
    assert (state.position, state.status, state.evaluated_seq) == ("aggregate", "failed", 0)
    assert state.failure is not None
    assert (state.failure.kind, state.failure.retryable) == ("eval", False)
    assert says in state.failure.message


async def test_a_result_that_the_log_lacks_is_infrastructure(crew: Any) -> None:
    state = await judged(crew, EvaluationSpec(), closed_seq=999_999)
    assert (state.position, state.attempt) == ("init", 2)
    failure = (await crew.life(state.rollout))[-1].failure
    assert (failure.kind, failure.message) == ("infra", "the log has no event 999999")


async def test_a_fresh_sandbox_has_the_working_directory_of_the_agent_and_nothing_else(crew: Any) -> None:
    async def agent(sandbox: Sandbox) -> None:
        await sandbox.put_files({".profile": "echo tampered", "bin/python3": "#!/bin/sh\n"}, base="home")
        await sandbox.put_files({"sub/new": "1", "sitecustomize.py": "raise SystemExit", "sub/sitecustomize.py": ""})
        await sandbox.exec(
            "rm given.txt; chmod +x sub/new; ln -s /etc/passwd link; mkfifo pipe; sleep 1000 &", timeout_s=9
        )

    script = """
        [ "$(cat made.txt)" = "by the agent" ] || exit 2
        [ -x sub/new ] && [ -L link ] || exit 3
        [ ! -e given.txt ] || exit 4
        [ ! -e "$HOME/.profile" ] && [ ! -e "$HOME/bin" ] || exit 5
        [ ! -e sitecustomize.py ] && [ ! -e sub/sitecustomize.py ] || exit 6
        [ -e test_file ] || exit 7
        touch "$LEDGER/ran"
    """
    ledger = crew.config.data_dir() / "ledger"
    ledger.mkdir()
    spec = SandboxSpec(files={"given.txt": "g"}, setup=["test -e given.txt"], env={"LEDGER": str(ledger)})
    args = command(script, files={"test_file": ""})
    event = await verdict(crew, EvaluationSpec(rule="command", args=args), agent=agent, sandbox_spec=spec)
    assert (event.reward, list(ledger.iterdir())) == (1.0, [ledger / "ran"])


async def test_the_same_sandbox_when_the_task_says_so(crew: Any) -> None:
    async def agent(sandbox: Sandbox) -> None:
        await sandbox.put_files({"seen": "1"}, base="home")

    args = command('test -e "$HOME/seen"')
    spec = EvaluationSpec(rule="command", args=args, sandbox="same")
    assert (await verdict(crew, spec, agent=agent)).reward == 1.0


async def test_the_files_that_a_task_gives_are_kept_where_the_agents_are_dropped(crew: Any) -> None:
    async def agent(sandbox: Sandbox) -> None:
        await sandbox.put_files({"conftest.py": "the agent's", "sub/conftest.py": "the agent's"})

    spec = SandboxSpec(files={"conftest.py": "the task's"})
    args = command('[ "$(cat conftest.py)" = "the task\'s" ] && [ ! -e sub/conftest.py ]', drop=["conftest.py"])
    event = await verdict(crew, EvaluationSpec(rule="command", args=args), agent=agent, sandbox_spec=spec)
    assert event.reward == 1.0


async def test_a_rule_that_fails_is_tried_again_each_time_in_another_sandbox(
    crew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_stage, "FIRST_PAUSE_S", 0.01)
    script = f'echo "$HOME" >>{tmp_path}/tries; [ $(wc -l <{tmp_path}/tries) -ge 3 ] && echo 0.5 >r'
    args = command(script, reward_file="r")
    assert (await verdict(crew, EvaluationSpec(rule="command", args=args))).reward == 0.5
    tries = (tmp_path / "tries").read_text().splitlines()
    assert (len(tries), len(set(tries))) == (3, 3)


async def test_after_the_last_try_there_is_no_reward_and_nothing_is_left(
    crew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_stage, "FIRST_PAUSE_S", 0.01)
    args = command(f"echo x >>{tmp_path}/tries; echo why >&2", reward_file="r")
    state = await judged(crew, EvaluationSpec(rule="command", args=args, max_tries=2))
    assert (state.status, state.evaluated_seq, (tmp_path / "tries").read_text()) == ("failed", 0, "x\nx\n")
    assert state.failure is not None
    assert (state.failure.kind, "the command wrote: why" in state.failure.message) == ("eval", True)


async def test_a_fresh_sandbox_that_cannot_be_set_up_is_a_failed_evaluation(crew: Any, tmp_path: Path) -> None:
    spec = SandboxSpec(setup=[f"! test -e {tmp_path}/broken"])
    (tmp_path / "broken").touch()
    evaluation = EvaluationSpec(rule="command", args=command("true"), max_tries=1)
    state = await judged(crew, evaluation, sandbox_spec=spec)
    assert state.failure is not None
    assert (state.failure.kind, "setup command 1" in state.failure.message) == ("eval", True)


@pytest.mark.parametrize(
    ("skip", "fields", "metric"),
    [
        ("no_answer", {"answer": " \n"}, "skipped_no_answer"),
        ("truncated", {"status": "truncated"}, "skipped_truncated"),
        ("empty_diff", {"agent": lambda sandbox: sandbox.exec("rm made.txt", timeout_s=9)}, "skipped_empty_diff"),
    ],
)
async def test_what_is_not_worth_a_judgement_gets_the_reward_of_skipping(
    crew: Any, skip: Any, fields: dict[str, Any], metric: str
) -> None:
    evaluation = EvaluationSpec(rule="command", args=command("true"), skip=(skip,), skip_reward=-0.5)
    event = await verdict(crew, evaluation, **fields)
    assert (event.reward, event.metrics) == (-0.5, {metric: 1.0})


@pytest.mark.parametrize("skip", ["no_answer", "truncated", "empty_diff"])
async def test_what_is_worth_it_is_judged(crew: Any, skip: Any) -> None:
    event = await verdict(crew, EvaluationSpec(rule="command", args=command("true"), skip=(skip,)))
    assert (event.reward, event.metrics) == (1.0, {})


async def test_named_rewards_and_the_end_of_the_log_are_kept(crew: Any) -> None:
    said = '{"reward": 0.25, "rewards": {"style": 0.5, "tests": 0}}'
    args = command(f"echo to be read; echo '{said}' >r", reward_file="r")
    event = await verdict(crew, EvaluationSpec(rule="command", args=args))
    assert (event.reward, event.rewards, event.log) == (0.25, {"style": 0.5, "tests": 0.0}, "to be read")


async def begin(crew: Any, started: Path) -> tuple[asyncio.Task[Any], Any]:
    """A worker in the middle of the evaluation, and its message: its verifier has made the file `started`."""
    local = crew.context.backends["local"]
    (held,) = await crew.take("eval", local.place)
    task = asyncio.create_task(StageHandler(crew.context, Eval(crew.context))(held))
    await crew.until(lambda: asyncio.to_thread(started.exists))
    return task, held


async def die(crew: Any, started: Path) -> None:
    """A worker begins and ends there; its message comes again."""
    task, held = await begin(crew, started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await held.nak()


async def test_a_second_worker_attaches_to_the_verifier_of_the_first(crew: Any, tmp_path: Path) -> None:
    script = f"echo x >>{tmp_path}/started; while ! test -e {tmp_path}/go; do sleep 0.05; done; echo 0.5 >r"
    state = await left_by_agent(crew, EvaluationSpec(rule="command", args=command(script, reward_file="r")))
    await die(crew, tmp_path / "started")
    local = crew.context.backends["local"]
    assert sorted(labels.role for _, labels in await local.list_owned()) == ["agent", "eval"]
    (tmp_path / "go").touch()
    (held,) = await crew.take("eval", local.place)
    assert held.deliveries > 1
    assert await StageHandler(crew.context, Eval(crew.context))(held) == Ack()
    event = (await crew.life(state.rollout))[-1]
    assert (event.reward, (tmp_path / "started").read_text()) == (0.5, "x\n")
    assert await local.list_owned() == []


async def test_a_half_made_sandbox_of_a_dead_worker_is_replaced(crew: Any, tmp_path: Path) -> None:
    spec = SandboxSpec(setup=[f"echo x >>{tmp_path}/setups; test -e {tmp_path}/go || sleep 1000"])
    state = await left_by_agent(crew, EvaluationSpec(rule="command", args=command("true")), sandbox_spec=spec)
    await die(crew, tmp_path / "setups")
    local = crew.context.backends["local"]
    (half,) = [ref for ref, labels in await local.list_owned() if labels.role == "eval"]
    (tmp_path / "go").touch()
    (held,) = await crew.take("eval", local.place)
    assert await StageHandler(crew.context, Eval(crew.context))(held) == Ack()
    assert (await crew.life(state.rollout))[-1].reward == 1.0
    assert (tmp_path / "setups").read_text() == "x\nx\n"
    assert not Path(half.handle).exists()
    assert await local.list_owned() == []


async def test_a_cancelled_evaluation_leaves_no_sandbox(crew: Any, tmp_path: Path) -> None:
    state = await left_by_agent(crew, EvaluationSpec(rule="command", args=command(f"touch {tmp_path}/on; sleep 1000")))
    working, _ = await begin(crew, tmp_path / "on")
    await Client(crew.bus, "r").cancel()
    assert await working == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.status) == ("aggregate", "cancelled")
    assert await crew.context.backends["local"].list_owned() == []


class Judge:
    """A handler that judges itself, or leaves it to the rule."""

    async def eval(self, context: Any) -> Any:
        if context.result.answer == "rule":
            return await context.default()
        if context.result.answer == "bad":
            return {"rewart": 1}
        return {"rewards": {"a": 1, "b": 0}, "metrics": {"carried": context.carried["n"]}}


@pytest.mark.parametrize(
    ("answer", "reward", "rewards", "metrics"),
    [("own", 0.5, {"a": 1.0, "b": 0.0}, {"carried": 3.0}), ("rule", 1.0, {}, {})],
)
async def test_a_handler_judges_in_the_place_of_the_rule(
    crew: Any, answer: str, reward: float, rewards: dict[str, float], metrics: dict[str, float]
) -> None:
    evaluation = EvaluationSpec(rule="command", args=command("true"))
    event = await verdict(crew, evaluation, answer=answer, handler=f"{__name__}:Judge", carried={"n": 3})
    assert (event.reward, event.rewards, event.metrics) == (reward, rewards, metrics)


async def test_a_handler_that_returns_no_verdict_is_a_failed_evaluation(crew: Any) -> None:
    evaluation = EvaluationSpec(max_tries=1)
    state = await judged(crew, evaluation, answer="bad", handler=f"{__name__}:Judge")
    assert state.failure is not None
    assert (state.failure.kind, "no field rewart in a verdict" in state.failure.message) == ("eval", True)


# --- rules of the user's own ---

SAYS: dict[str, Any] = {
    "raises": ValueError("oh no"),
    "is late by itself": TimeoutError("of its own"),
    "wants to end the process": SystemExit(3),
    "says nothing is wrong": EvaluationError("as it likes", hint="do so"),
    "asks a model": ModelError("no model"),
    "text": "good",
    "nan": float("nan"),
    "text as the reward": Verdict("good"),  # type: ignore[arg-type]
    "text as a metric": Verdict(1, {"passed": "all"}),  # type: ignore[dict-item]
    "none": None,
    "number": 0.5,
    "fields": {"reward": 1, "metrics": {"n": 2}},
    "verdict": Verdict(0.25, {"n": 3}),
}
tries: list[str] = []


class Own:
    """A rule of the user's own that does what its argument says."""

    def __init__(self, says: str) -> None:
        self.says = says

    @classmethod
    def from_args(cls, args: Any) -> Any:
        if args["says"] == "nothing of itself":
            raise KeyError("path")
        if args["says"] == "no rule":
            return None
        own = cls(args["says"])
        own.isolation = args.get("isolation", "none")  # type: ignore[attr-defined]
        return own

    async def reward(self, context: Any) -> Any:
        tries.append(self.says)
        value = SAYS[self.says]
        if isinstance(value, BaseException):
            raise value
        return value


class Plain(Own):
    """It is not async."""

    def reward(self, context: Any) -> Any:  # type: ignore[override]
        return 0.5


class Passing(Own):
    """It hands over what another one awaits."""

    def reward(self, context: Any) -> Any:  # type: ignore[override]
        return super().reward(context)


@pytest.fixture(autouse=True)
def no_tries() -> None:
    tries.clear()


def own(says: str, rule: type[Own] = Own, **fields: Any) -> EvaluationSpec:
    return EvaluationSpec(rule=f"{__name__}:{rule.__name__}", args={"says": says}, max_tries=2, **fields)


@pytest.mark.parametrize(
    ("says", "message", "times"),
    [
        ("raises", f"reward of the rule '{__name__}:Own' raised ValueError: oh no", 2),
        ("is late by itself", "raised TimeoutError: of its own", 2),
        ("wants to end the process", "SystemExit(3)", 2),
        ("says nothing is wrong", "as it likes", 2),
        ("asks a model", "no model", 1),
        ("text", f"reward of the rule '{__name__}:Own' returned 'good': 'good' is no finite number", 2),
        ("nan", "nan is no finite number", 2),
        ("text as the reward", "'good' is no finite number", 2),
        ("text as a metric", "'all' is no finite number", 2),
        ("nothing of itself", f"from_args of '{__name__}:Own' raised KeyError: 'path'", 0),
        ("no rule", f"'{__name__}:Own' is no rule", 0),
    ],
)
async def test_a_rule_of_the_users_own_that_does_not_work_is_a_failed_evaluation(
    crew: Any, monkeypatch: pytest.MonkeyPatch, says: str, message: str, times: int
) -> None:
    monkeypatch.setattr(eval_stage, "FIRST_PAUSE_S", 0.01)
    state = await judged(crew, own(says))
    assert (state.position, state.status, state.evaluated_seq) == ("aggregate", "failed", 0)
    assert state.failure is not None
    assert (state.failure.kind, len(tries)) == ("eval", times)
    assert message in state.failure.message
    assert state.failure.hint or says == "asks a model"


@pytest.mark.parametrize(
    ("says", "rule", "reward", "metrics"),
    [
        ("none", Own, None, {}),
        ("number", Own, 0.5, {}),
        ("fields", Own, 1.0, {"n": 2.0}),
        ("verdict", Own, 0.25, {"n": 3.0}),
        ("number", Plain, 0.5, {}),
        ("number", Passing, 0.5, {}),
    ],
)
async def test_what_a_rule_of_the_users_own_returns_is_read_as_that_of_a_handler(
    crew: Any, says: str, rule: type[Own], reward: float | None, metrics: dict[str, float]
) -> None:
    event = await verdict(crew, own(says, rule))
    assert (event.reward, event.metrics) == (reward, metrics)


async def test_a_part_of_a_composite_that_raises_is_named(crew: Any) -> None:
    part = {"rule": f"{__name__}:Own", "name": "own", "args": {"says": "raises"}}
    state = await judged(crew, EvaluationSpec(rule="composite", args={"parts": [part]}, max_tries=1))
    assert state.failure is not None
    assert (state.failure.kind, f"rule '{__name__}:Own' raised ValueError" in state.failure.message) == ("eval", True)


@pytest.mark.parametrize(("says", "isolation"), [("nothing of itself", "none"), ("no rule", "none"), ("none", "Fresh")])
def test_a_rule_of_the_users_own_that_cannot_be_made_is_refused_at_admission(says: str, isolation: str) -> None:
    evaluation = EvaluationSpec(rule=f"{__name__}:Own", args={"says": says, "isolation": isolation})
    (problem,) = check_task(Task(prompt="p", evaluation=evaluation))
    assert problem.startswith("evaluation.rule: ")
    assert f"'{__name__}:Own'" in problem
