"""Rule `math`: equality of expressions, in a process that cannot hold the worker."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.task import Task
from rollyard.stages.evaluator import EvalContext, Verdict, open_rule
from rollyard.stages.evaluators import math_process
from rollyard.stages.evaluators.math_process import MathProcesses, MathTrouble


async def judge(args: dict[str, Any], answer: str, timeout_s: float = 60) -> Verdict:
    result = AgentResult(exit_code=0, answer=answer)
    context = EvalContext(task=Task(prompt="p"), result=result, sandbox=None, timeout_s=timeout_s)
    return await open_rule("math", args).reward(context)


@pytest.mark.parametrize(
    ("accepted", "answer", "reward"),
    [
        ("1/2", "so it is \\boxed{0.5}", 1),
        ("\\frac{1}{2}", "0.5", 1),
        ("0.5", "$\\frac12$", 1),
        ("$x^2+2x+1$", "$(x+1)^2$", 1),
        ("2\\sqrt{3}", "$\\sqrt{12}$", 1),
        ("\\{1,2,3\\}", "$\\{3,2,1\\}$", 1),
        ("[0,1)", "\\boxed{[0,1)}", 1),
        ("[0,1)", "\\boxed{[0,1]}", 0),
        ("10\\%", "10%", 1),
        ("1,234", "1234", 1),
        ("42", "First 41, then \\boxed{42}.", 1),
        ("41", "First \\boxed{41}, then \\boxed{42}.", 0),
        ("42", "\\boxed{42} as 6 times 7, not 43", 1),
        ("no solution", "\\boxed{no solution}", 1),
        ("42", "forty-three", 0),
        ("42", "", 0),
        ("\\frac{a}{b}", "\\boxed{\\frac{a}{b}}", 1),
        ("x=5", "\\boxed{5}", 1),
        ("10^{6}", "\\boxed{1000000}", 1),
    ],
)
async def test_equal_expressions(accepted: str, answer: str, reward: float) -> None:
    assert (await judge({"answer": accepted}, answer)).reward == reward


async def test_any_accepted_answer_will_do_and_a_box_may_be_asked_for() -> None:
    assert (await judge({"answers": ["1", "2"]}, "\\boxed{2}")).reward == 1
    assert (await judge({"answer": "2", "boxed_only": True}, "it is 2")) == Verdict(0.0, {"found": 0.0})
    assert (await judge({"answer": "0.333", "digits": 3}, "\\boxed{0.3333}")).reward == 1
    assert (await judge({"answer": "0.333"}, "\\boxed{0.3343}")).reward == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [({}, "give `answer` or `answers`"), ({"answer": " "}, "is empty"), ({"answer": "1", "digits": 0}, "digits")],
)
def test_what_cannot_be_asked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule("math", args)


async def test_an_accepted_answer_that_is_no_expression_is_a_failure_and_no_zero() -> None:
    with pytest.raises(EvaluationError, match=r"'\$\$' is no expression"):
        await judge({"answer": "$$"}, "5")


async def test_an_answer_that_takes_for_ever_ends_and_the_next_one_is_judged() -> None:
    with pytest.raises(EvaluationError, match="takes longer than 2 s, or more memory"):
        await judge({"answer": "(x+1)^{3000}"}, "\\boxed{(x+1)^{2999}(x+2)}", timeout_s=2)
    assert (await judge({"answer": "1"}, "\\boxed{1}")).reward == 1


def test_processes_are_used_again_replaced_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = MathProcesses()
    question = {"accepted": ["1"], "answer": "1", "digits": 6, "boxed_only": False}
    assert processes.ask(question, 30)["equal"]
    (first,) = processes._idle
    assert processes.ask(question, 30)["equal"]
    assert processes._idle == [first]
    os.kill(first._process.pid, 9)
    first._process.wait()
    assert processes.ask(question, 30)["equal"]
    (second,) = processes._idle
    assert second is not first
    monkeypatch.setattr(math_process, "MAX_QUESTIONS", 1)
    assert processes.ask(question, 30)["equal"]
    assert second._process.poll() is not None
    with pytest.raises(MathTrouble):
        processes.ask(question | {"accepted": ["$$"]}, 30)
    processes.close()
    assert processes._idle == []
