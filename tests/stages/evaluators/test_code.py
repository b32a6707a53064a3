"""Rule `code`: programs on cases, with limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.stages.evaluator import open_rule
from rollyard.stages.evaluators.code import last_block, same_output, same_value

SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "20 22", "output": "42"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def fenced(source: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{source}```\nDone."


async def test_a_program_that_passes_every_case(court: Any) -> None:
    verdict = await court.judge("code", {"cases": SUMS}, answer=fenced(ADD))
    assert (verdict.reward, verdict.rewards) == (1.0, {"passed": 1.0})
    assert {name: verdict.metrics[name] for name in ("cases", "passed", "case_1", "case_2", "not_run")} == {
        "cases": 2.0,
        "passed": 2.0,
        "case_1": 1.0,
        "case_2": 1.0,
        "not_run": 0.0,
    }


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        ("print(3)\n", "passed"),
        ("a, b = map(int, input().split())\nif a > 9:\n    1 / 0\nprint(a + b)\n", "crashed"),
        ("a, b = map(int, input().split())\nwhile a > 9:\n    pass\nprint(a + b)\n", "timed_out"),
        ("a, b = map(int, input().split())\nif a > 9:\n    print('x' * 5000000)\nprint(a + b)\n", "too_much_output"),
        ("a, b = map(int, input().split())\nif a > 9:\n    x = bytearray(10**10)\nprint(a + b)\n", "crashed"),
    ],
)
async def test_a_program_that_fails_a_case_gets_its_share(court: Any, source: str, trouble: str) -> None:
    args = {"cases": SUMS, "credit": "share", "case_timeout_s": 1}
    verdict = await court.judge("code", args, answer=fenced(source))
    assert verdict.metrics["case_1"] == 1.0
    assert (verdict.reward, verdict.metrics["case_2"]) == (0.5, 0.0)
    if trouble != "passed":
        assert verdict.metrics[trouble] == 1.0
    strict = await court.judge("code", {"cases": SUMS, "case_timeout_s": 1}, answer=fenced(source))
    assert strict.reward == 0.0


async def test_a_program_that_is_slow_again_and_again_is_not_run_on(court: Any) -> None:
    cases = [{"input": "", "output": "x"}] * 50
    args = {"cases": cases, "credit": "share", "case_timeout_s": 0.3}
    verdict = await court.judge("code", args, answer=fenced("while True: pass\n"))
    assert (verdict.reward, verdict.metrics["timed_out"], verdict.metrics["not_run"]) == (0.0, 3.0, 47.0)


@pytest.mark.parametrize(
    ("answer", "metric"), [("", "no_program"), ("```python\nunclosed", "no_program"), ("I cannot", "crashed")]
)
async def test_no_program_is_worth_nothing(court: Any, answer: str, metric: str) -> None:
    verdict = await court.judge("code", {"cases": SUMS}, answer=answer)
    assert (verdict.reward, verdict.metrics[metric]) == (0.0, 1.0)


async def test_a_file_of_the_agent_is_run_and_nothing_else_of_it(court: Any) -> None:
    await court.agent.put_files({"sub/add.py": ADD, "sub/sitecustomize.py": "raise SystemExit(3)"})
    assert (await court.judge("code", {"cases": SUMS, "file": "sub/add.py"})).reward == 1.0
    assert (await court.judge("code", {"cases": SUMS, "file": "gone.py"})).metrics["no_program"] == 1.0


async def test_other_languages_by_a_command_and_a_build(court: Any) -> None:
    args = {"cases": SUMS, "save_as": "add.sh", "run": "sh built.sh", "build": "grep -v '^#' add.sh >built.sh"}
    source = "# add\nread a b\necho $((a + b))\n"
    assert (await court.judge("code", args, answer=fenced(source, "sh"))).reward == 1.0
    failed = await court.judge("code", args | {"build": "echo why >&2; exit 1"}, answer=fenced(source, "sh"))
    assert (failed.reward, failed.metrics["not_built"], failed.log) == (0.0, 1.0, "why\n")
    with pytest.raises(EvaluationError, match="there is no program 'rustc'"):
        await court.judge("code", args | {"run": "rustc add.rs"}, answer=fenced(source, "sh"))


FUNCTIONS = [{"args": [[3, 1, 2]], "result": [1, 2, 3]}, {"args": [[]], "result": []}]


@pytest.mark.parametrize(
    ("source", "function", "reward"),
    [
        ("def f(xs):\n    print('noise')\n    return sorted(xs)\n", "f", 1.0),
        ("class Solution:\n    def f(self, xs):\n        return sorted(xs)\n", "Solution.f", 1.0),
        ("def f(xs):\n    return xs\n", "f", 0.0),
        ("def g(xs):\n    return xs\n", "f", 0.0),
        ("def f(xs):\n    return {1, 2}\n", "f", 0.0),
        ("import os, sys\nsys.__stdout__.write('[1, 2, 3]')\nos._exit(0)\n", "f", 0.0),
    ],
)
async def test_functions_are_called_with_arguments(court: Any, source: str, function: str, reward: float) -> None:
    verdict = await court.judge("code", {"cases": FUNCTIONS, "function": function}, answer=fenced(source))
    assert verdict.reward == reward


async def test_what_is_expected_is_nowhere_in_the_sandbox(court: Any) -> None:
    source = "import subprocess\nprint(subprocess.run('cat $(find ../.. -type f) /proc/*/cmdline 2>/dev/null',"
    source += "shell=True, capture_output=True).stdout.count(b'SECRET' + b'42'))\n"
    verdict = await court.judge("code", {"cases": [{"output": "SECRET42"}]}, answer=fenced(source))
    assert verdict.reward == 0.0
    assert (await court.judge("code", {"cases": [{"output": "0"}], "files": {"x": "S"}}, answer=fenced(source))).reward


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"cases": []}, "length >= 1"),
        ({"cases": [{"input": "x"}]}, "a case has no `output`"),
        ({"cases": SUMS, "save_as": "../x"}, "leaves the sandbox"),
        ({"cases": SUMS, "compare": "almost"}, "compare"),
    ],
)
def test_what_cannot_be_asked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule("code", args)


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        ("```\na\n```\nand\n```py\nb\n```", "b\n"),
        ("~~~\na\n~~~", "a\n"),
        ("````\n```\n````", "```\n"),
        ("print(1)", "print(1)"),
        (" ", None),
    ],
)
def test_the_last_block_is_the_program(answer: str, source: str | None) -> None:
    assert last_block(answer) == source


@pytest.mark.parametrize(
    ("found", "expected", "compare", "same"),
    [
        ("1  2\n", "1 2", "words", True),
        ("1.0000001", "1.0", "words", True),
        ("1", "1.0", "words", True),
        ("1000000007", "1000000008", "words", False),
        ("1 2", "1", "words", False),
        ("a  \nb\n\n", "a\nb", "lines", True),
        ("a b", "a  b", "lines", False),
        ("a\n", "a", "exact", False),
        ("nan", "nan", "words", True),
        ("1e5", "abc", "words", False),
    ],
)
def test_outputs_are_compared(found: str, expected: str, compare: str, same: bool) -> None:
    assert same_output(found, expected, compare, 1e-6) is same


@settings(max_examples=50)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists, max_leaves=9))
def test_every_value_is_the_same_as_itself(value: Any) -> None:
    assert same_value(value, value, 1e-6)
    assert not same_value(value, [value], 0)
    assert not same_value(True, 1, 1e-6)
