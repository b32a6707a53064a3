"""Rule `choice`: what an answer settles on, however it says so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.task import Task
from rollyard.stages.evaluator import EvalContext, open_rule
from rollyard.stages.evaluators.choice import Choice

CITIES = ("London", "Paris", "New York", "York")
RULE = Choice(answer="B", options=CITIES)


@pytest.mark.parametrize(
    ("text", "picked"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        ("Paris", "B"),
        ("paris.", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B)", "B"),
        ("The answer is **(B) Paris**.", "B"),
        ("Answer: B", "B"),
        ("Answer:\n\nB", "B"),
        ("Final answer: \\boxed{B}", "B"),
        ("so \\boxed{\\text{B}}", "B"),
        ("so \\boxed{\\text{(B) Paris}}", "B"),
        ("$\\boxed{A}$ was my first guess, it is $\\boxed{B}$", "B"),
        ("The correct option is B, since London is elsewhere.", "B"),
        ("The correct answer is Paris", "B"),
        ("The answer is not A. The answer is B.", "B"),
        ("The answer is B. It is certainly not option A.", "B"),
        ("The answer is A. No, wait: the answer is B.", "B"),
        ("London is in England.\n\nB", "B"),
        ("I weighed (A) long, but the answer is (B)", "B"),
        ("It must be Paris", "B"),
        ("The answer is New York", "C"),
        ("It is clearly New York", "C"),
        ("The answer is (A) or (B)", "AB"),
        ("The answer is A, B and C", "ABC"),
        ("\\boxed{A, B}", "AB"),
        ("B or C", "BC"),
        ("London or Paris, who knows", "AB"),
        ("I looked at (A) and at (B).", "AB"),
        ("The answer is a matter of taste", ""),
        ("The answer is A matter of taste", ""),
        ("I do not know", ""),
        ("", ""),
        ("E", ""),
    ],
)
def test_what_is_picked(text: str, picked: str) -> None:
    assert "".join(sorted(RULE.picked(text))) == picked


@pytest.mark.parametrize(
    ("args", "text", "reward", "metrics"),
    [
        ({"answer": "B"}, "The answer is B", 1, {"found": 1, "ambiguous": 0}),
        ({"answer": "(b)"}, "The answer is B", 1, {"found": 1, "ambiguous": 0}),
        ({"answer": "Paris", "options": CITIES}, "(B)", 1, {"found": 1, "ambiguous": 0}),
        ({"answer": "B", "options": CITIES}, "A or B", 0, {"found": 1, "ambiguous": 1}),
        ({"answer": "B"}, "who knows", 0, {"found": 0, "ambiguous": 0}),
        ({"answer": "3", "labels": "1234"}, "The answer is 3.", 1, {"found": 1, "ambiguous": 0}),
        ({"answer": "3", "labels": "1234"}, "The answer is 35.", 0, {"found": 0, "ambiguous": 0}),
    ],
)
async def test_the_reward(args: dict[str, Any], text: str, reward: float, metrics: dict[str, float]) -> None:
    context = EvalContext(
        task=Task(prompt="p"), result=AgentResult(exit_code=0, answer=text), sandbox=None, timeout_s=5
    )
    verdict = await open_rule("choice", args).reward(context)
    assert (verdict.reward, verdict.metrics) == (reward, metrics)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"answer": "Rome", "options": CITIES}, "'Rome' is no label, and the text of no option"),
        ({"answer": "E", "options": CITIES}, "'E' is no label"),
        ({"answer": "A", "options": ["x", "X "]}, "has a text twice"),
        ({"answer": "A", "options": ["x", "y", "z"], "labels": "AB"}, "has 3 texts, `labels` only 2"),
        ({"answer": "A", "labels": "Aa"}, "names a label twice"),
    ],
)
def test_what_cannot_be_asked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule("choice", args)


@given(st.text(max_size=300), st.sampled_from("ABCD"))
def test_a_box_at_the_end_counts_whatever_stands_before(before: str, label: str) -> None:
    assert RULE.picked(f"{before}\n\\boxed{{{label}}}") == {label}


@given(st.text(alphabet="ABCD()answeri :,.or\\boxed{}\n*", max_size=200))
def test_any_text_gives_labels_or_nothing(text: str) -> None:
    assert RULE.picked(text) <= set("ABCD")
