"""EVAL: the reward by the task's rule, or none; a rule that does not work is a failure as data."""

from __future__ import annotations

from typing import Any

import pytest

from rollyard.pipeline.consumer import Ack
from rollyard.schemas import subjects
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent, RolloutState
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task, Timeouts
from rollyard.stages.eval import Eval
from rollyard.stages.sandbox import Labels
from rollyard.stages.stage import StageHandler


async def judged(crew: Any, evaluation: EvaluationSpec, answer: str = "42", **fields: Any) -> RolloutState:
    """What becomes of a rollout whose agent gave an answer and left a file."""
    agent = AgentSpec(harness="command", args={"command": ["true"]})
    timeouts = fields.pop("timeouts", Timeouts())
    task = Task(prompt="p", id="t", agent=agent, evaluation=evaluation, timeouts=timeouts)
    local = crew.context.backends["local"]
    labels = Labels(run="r", rollout_id=subjects.rollout_id("r", "t", 0), attempt=1, owner="w1", created_ms=0)
    sandbox = await local.create(labels)
    await sandbox.put_files({"made.txt": "by the agent"})
    facts = {"position": "eval", "place": local.place, "sandbox": sandbox.ref, "step": 2, "status": "completed"}
    result = AgentResult(exit_code=0, answer=answer)
    event = RolloutEvent(kind="ran", rollout=Rollout.of("r", "t", 0, 1), attempt=1, at_ms=1, result=result)
    closed_seq = await crew.context.record(event)
    state = await crew.start(task, **(facts | {"closed_seq": closed_seq} | fields))
    (held,) = await crew.take("eval", local.place)
    assert await StageHandler(crew.context, Eval(crew.context))(held) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    assert await local.list_owned() == []
    return after


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
        (EvaluationSpec(rule="python", args={"entry": "json:dumps"}), Timeouts(), "json:dumps"),
        (EvaluationSpec(rule="command", args={"command": "sleep 60"}), Timeouts(eval_s=0.4), "0.4 s"),
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
