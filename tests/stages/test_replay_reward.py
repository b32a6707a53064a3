"""A new evaluation rule on what was logged: no model is asked, and there is no sandbox."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.log import BusLog
from rollyard.pipeline.sample_diff import Diff
from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas.errors import TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent
from rollyard.schemas.sample import Commit, Delivery
from rollyard.schemas.task import EvaluationSpec, Task
from rollyard.stages.arrow import Received
from rollyard.stages.evaluator import EvalContext, Verdict
from rollyard.stages.reevaluation import Reevaluation, stored_tasks, task_of_commit
from rollyard.stages.remake import Draft, Recipe, with_verdict
from rollyard.stages.replay import RemakeReport, remake_run

ODD = f"{__name__}:Odd"


def played(new_session: Any, index: int, answer: str, task_id: str = "task") -> Any:
    """A session whose agent gave an answer."""
    session = new_session(random.Random(index), rollout=Rollout.of("run", task_id, index, 9))
    session.ask(session.ask(None))
    for call_id in list(session.owed):
        session.log(session.owed.pop(call_id))
    session.answer = answer
    return session


def answered(session: Any) -> None:
    """Put the answer into what RUN logged."""
    result = AgentResult(exit_code=0, answer=session.answer)
    session.events = [
        (seq, structs.replace(event, result=result))
        if isinstance(event, RolloutEvent) and event.kind == "ran"
        else (seq, event)
        for seq, event in session.events
    ]


async def judge(bus: Bus, spec: EvaluationSpec, **wanted: Any) -> tuple[RemakeReport, list[Delivery]]:
    made: list[Received] = []
    rule = Reevaluation(spec, stored_tasks(TaskStore(bus)))
    report = await remake_run(BusLog(bus), "run", Recipe(reward=spec), judge=rule, write=made.append, **wanted)
    return report, [each.delivery for each in made]


@pytest.fixture
def log_answer(new_session: Any, log_session: Any) -> Any:
    """Logs a rollout whose agent gave an answer, with the reward that it had."""

    async def log(index: int, answer: str, reward: float | None = 0.0, **changes: Any) -> Commit:
        task_id = changes.pop("task_id", "task")
        session = played(new_session, index, answer, task_id)
        commit = session.close(reward, stitcher="2", task_id=task_id, group_id=task_id, **changes)
        answered(session)
        logged: Commit = await log_session(session, commit)
        return logged

    return log


async def test_rewards_come_from_the_stored_answers(bus: Bus, log_answer: Any) -> None:
    commits = [await log_answer(0, "it is 42"), await log_answer(1, "no idea", 1.0), await log_answer(2, "42", None)]
    spec = EvaluationSpec(rule="contains", args={"answer": "42"})
    diff = Diff()
    report, made = await judge(bus, spec, diff=diff)
    assert [delivery.reward for delivery in made] == [1.0, 0.0, 1.0]
    assert [sample.reward for delivery in made for sample in delivery.samples] == [1.0, 0.0, 1.0]
    assert (report.judged, report.not_judged, report.mismatches) == (3, {}, ())
    assert (diff.before.rewarded, diff.before.reward_sum) == (2, 1.0)
    assert (diff.after.rewarded, diff.after.reward_sum) == (3, 2.0)
    assert {kind: total.samples for kind, total in diff.kinds.items()} == {"reward": 3}
    committed = {sample.sample_id for commit in commits for sample in commit.samples}
    one = {sample.sample_id for delivery in made for sample in delivery.samples}
    _, made = await judge(bus, EvaluationSpec(rule="contains", args={"answer": "43"}))
    other = {sample.sample_id for delivery in made for sample in delivery.samples}
    assert len(committed | one | other) == 9


async def test_arguments_that_the_file_leaves_out_are_those_of_the_task(bus: Bus, log_answer: Any) -> None:
    tasks = TaskStore(bus)
    for name, args in (("five", {"answer": "Five"}), ("six", {"answer": "Six", "word": True})):
        rule = "contains" if "word" in args else "exact"
        await tasks.put("run", Task(id=name, prompt="?", evaluation=EvaluationSpec(rule=rule, args=args)))
    for index, (answer, task_id) in enumerate([("five", "five"), ("5", "five"), ("six", "six"), ("Six", "six")]):
        await log_answer(index, answer, task_id=task_id)
    _, made = await judge(bus, EvaluationSpec(rule="exact"))
    assert [delivery.reward for delivery in made] == [0.0, 0.0, 0.0, 1.0]
    _, made = await judge(bus, EvaluationSpec(rule="exact", args={"ignore_case": True}))
    assert [delivery.reward for delivery in made] == [1.0, 0.0, 1.0, 1.0]


async def test_a_rollout_on_which_the_rule_fails_has_no_reward_and_stops_no_other(bus: Bus, log_answer: Any) -> None:
    await TaskStore(bus).put("run", Task(id="known", prompt="?", evaluation=EvaluationSpec(args={"answer": "42"})))
    await log_answer(0, "42", 1.0)
    await log_answer(1, "42", 1.0, task_id="known")
    await log_answer(2, "42", 1.0)
    report, made = await judge(bus, EvaluationSpec(rule="exact"))
    assert [delivery.reward for delivery in made] == [None, 1.0, None]
    assert [sample.reward for sample in made[0].samples] == [None]
    assert report.judged == 1
    assert list(report.not_judged.values()) == [2]
    assert "give `answer` or `answers`" in next(iter(report.not_judged))


class Odd:
    """A rule that is no struct: it fails as a program of others may, and gives all that a verdict can hold."""

    @classmethod
    def from_args(cls, args: Any) -> Odd:
        if args:
            raise TaskError("args: Odd takes none")
        return cls()

    async def reward(self, context: EvalContext) -> Verdict:
        if context.result.answer == "crash":
            raise ZeroDivisionError("of others")
        assert context.sandbox is None
        metrics = {"metadata": float(context.task.metadata["b"]), "group": float(context.task.group_size)}
        return Verdict(float(len(context.task.prompt)), metrics, [None, 0.5])


async def test_a_rule_of_another_package_may_crash_and_sees_what_the_commit_tells_of_the_task(
    bus: Bus, log_answer: Any
) -> None:
    await log_answer(0, "fine")
    await log_answer(1, "crash")
    diff = Diff()
    report, made = await judge(bus, EvaluationSpec(rule=ODD), diff=diff)
    assert [turn.reward for turn in made[0].samples[0].turns] == [None, 0.5]
    assert diff.kinds["turn_rewards"].samples == 1
    assert made[0].metrics == {"metadata": 1.0, "group": 9.0}
    assert [delivery.reward for delivery in made] == [0.0, None]
    assert report.not_judged == {f"the rule {ODD} failed: ZeroDivisionError: of others": 1}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (EvaluationSpec(rule="command", args={"command": "true"}), r"rule: 'command' works in the agent's sandbox"),
        (EvaluationSpec(rule="numerik"), r"no evaluation rule is called 'numerik' \(did you mean 'numeric'\?"),
        (EvaluationSpec(rule="exact", args={"anser": "1"}), r"args.anser: unknown argument \(arguments are: answer,"),
        (EvaluationSpec(rule="numeric", args={"tolerance": -1}), r"args.tolerance: Expected `float` >= 0"),
        (EvaluationSpec(rule=ODD, args={"x": 1}), "args: Odd takes none"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_anything_is_read(spec: EvaluationSpec, says: str) -> None:
    async def some_task(commit: Commit) -> Task:
        return task_of_commit(commit)

    with pytest.raises(TaskError, match=says):
        Reevaluation(spec, some_task)


def test_without_tasks_every_argument_must_be_given() -> None:
    with pytest.raises(TaskError, match="give `answer` or `answers`"):
        Reevaluation(EvaluationSpec(rule="exact"))
    Reevaluation(EvaluationSpec(rule="exact", args={"answer": "42"}))


async def test_where_no_agent_ran_nothing_is_judged(bus: Bus, log_answer: Any) -> None:
    failure = Failure.of("init", "no sandbox")
    await log_answer(0, "42", None, status="failed", failure=failure, closed_seq=0, evaluated_seq=0)
    report, made = await judge(bus, EvaluationSpec(rule="exact", args={"answer": "42"}))
    assert (report.judged, report.not_judged, made[0].reward, made[0].status) == (0, {}, None, "failed")


async def test_what_a_commit_leaves_out_is_not_judged(bus: Bus, log_answer: Any) -> None:
    """Aggregate gave this rollout up: nothing of it counts, unless it is recovered."""
    gave_up = Failure.of("infra", "aggregate was tried 5 times")
    await log_answer(0, "42", 1.0, status="failed", failure=gave_up, cut_seq=0)
    spec = EvaluationSpec(rule="exact", args={"answer": "42"})
    report, made = await judge(bus, spec)
    assert (report.judged, made[0].reward, made[0].status) == (0, None, "failed")
    rule = Reevaluation(spec)
    report = await remake_run(BusLog(bus), "run", Recipe(reward=spec, recover=True), judge=rule)
    assert (report.judged, report.recovered, report.made.reward_sum) == (1, 1, 1.0)


async def test_a_rollout_that_was_never_judged_can_be(bus: Bus, new_session: Any, log_session: Any) -> None:
    """The evaluation that failed left no event; what stands in the log behind the cut does not count for that."""
    session = played(new_session, 0, "42")
    commit = session.close(stitcher="2", evaluated_seq=0, cut_seq=0)
    answered(session)
    session.events.pop()
    commit = structs.replace(commit, cut_seq=commit.closed_seq)
    await log_session(session, commit)
    _, made = await judge(bus, EvaluationSpec(rule="exact", args={"answer": "42"}))
    (sample,) = made[0].samples
    assert (made[0].reward, sample.reward, sample.timings.evaluated_ms, sample.timings.run_ended_ms) == (
        1.0,
        1.0,
        0,
        20,
    )


def test_a_verdict_takes_the_place_of_the_evaluation_that_counts(new_session: Any) -> None:
    session = played(new_session, 0, "42")
    commit = session.close(0.5, stitcher="2")
    later = session.log(RolloutEvent(kind="evaluated", rollout=session.rollout, attempt=1, at_ms=99, reward=0.25))
    draft = with_verdict(Draft(commit, session.events), Verdict(0.75, {"m": 2.0}))
    found = {seq: event for seq, event in draft.events if getattr(event, "kind", "") == "evaluated"}
    assert later not in found
    (judged,) = found.values()
    assert (judged.reward, judged.metrics, judged.at_ms) == (0.75, {"m": 2.0}, 30)
    assert draft.commit == commit
