"""Every evaluation rule, on real sandboxes where it needs one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import EvaluationError, SandboxError, TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import Task
from rollyard.stages.evaluator import EvalContext, Rule, Verdict, open_rule
from rollyard.stages.evaluators.numeric import numbers_in
from rollyard.stages.sandbox import Labels, Sandbox
from rollyard.stages.sandboxes.local import LocalBackend, LocalSettings


def context(answer: str = "", *, sandbox: Sandbox | None = None, timeout_s: float = 30) -> EvalContext:
    task = Task(prompt="p", sandbox=SandboxSpec(env={"FROM_TASK": "yes"}))
    return EvalContext(task=task, result=AgentResult(exit_code=0, answer=answer), sandbox=sandbox, timeout_s=timeout_s)


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with LocalBackend(LocalSettings(root=str(tmp_path / "sandboxes"))) as backend:
        sandbox = await backend.create(Labels(run="r", rollout_id="r1", attempt=1, owner="w", created_ms=0))
        yield sandbox
        await sandbox.destroy()


@pytest.mark.parametrize(
    ("rule", "args", "answer", "reward"),
    [
        ("none", {}, "anything", None),
        ("exact", {"answer": "Paris"}, " Paris\n", 1),
        ("exact", {"answer": "Paris"}, "paris", 0),
        ("exact", {"answer": "Paris", "ignore_case": True}, "PARIS", 1),
        ("exact", {"answer": "Paris", "strip": False}, "Paris\n", 0),
        ("exact", {"answers": ["a", "b"]}, "b", 1),
        ("exact", {"answer": "a", "answers": ["b"]}, "a", 1),
        ("contains", {"answer": "5"}, "2 + 3 = 5.", 1),
        ("contains", {"answer": "5"}, "it is 15", 1),
        ("contains", {"answer": "5", "word": True}, "it is 15", 0),
        ("contains", {"answer": "5", "word": True}, "(5)", 1),
        ("contains", {"answer": "a.c", "word": True}, "abc", 0),
        ("contains", {"answers": ["x", "y"]}, "y", 1),
        ("contains", {"answers": ["x", "y"], "all": True}, "y", 0),
        ("contains", {"answers": ["X", "y"], "all": True, "ignore_case": True}, "yx", 1),
        ("regex", {"pattern": r"^\d+$"}, " 12\n", 1),
        ("regex", {"pattern": r"^\d+$"}, "12a", 0),
        ("regex", {"pattern": "b.c", "ignore_case": True, "dotall": True}, "aB\nCd", 1),
        ("regex", {"pattern": "^b", "multiline": True}, "a\nb", 1),
        ("regex", {"pattern": "a", "full": True}, "ab", 0),
        ("regex", {"pattern": "ä+"}, "ää", 1),
        ("numeric", {"answer": 5}, "2 + 3 = 5", 1),
        ("numeric", {"answer": 2}, "2 + 3 = 5", 0),
        ("numeric", {"answer": 2, "which": "first"}, "2 + 3 = 5", 1),
        ("numeric", {"answer": 3, "which": "any"}, "2 + 3 = 5.", 1),
        ("numeric", {"answer": 1234.5}, "about 1,234.5", 1),
        ("numeric", {"answer": -1e-3}, "x=-1e-3", 1),
        ("numeric", {"answer": 3.14, "tolerance": 0.01}, "3.1415", 1),
        ("numeric", {"answer": 100, "relative": 0.1}, "91", 1),
        ("numeric", {"answer": 100, "relative": 0.1}, "89", 0),
        ("numeric", {"answer": 5}, "five", 0),
    ],
)
async def test_rules_without_a_sandbox(rule: str, args: dict[str, Any], answer: str, reward: float | None) -> None:
    assert await open_rule(rule, args).reward(context(answer)) == Verdict(reward)


@pytest.mark.parametrize(
    ("rule", "args", "says"),
    [
        ("exakt", {}, "did you mean 'exact'"),
        ("exact", {}, "give `answer` or `answers`"),
        ("exact", {"answer": 5}, r"evaluation.args.answer: Expected `str \| null`, got `int`"),
        ("exact", {"answer": " "}, "is empty"),
        ("exact", {"answer": "a", "case": True}, "unknown field `case`.*arguments are: answer"),
        ("contains", {"answers": "abc"}, "evaluation.args.answers"),
        ("regex", {"pattern": "("}, "`pattern` is no regular expression: missing"),
        ("regex", {}, "missing required field `pattern`"),
        ("numeric", {"answer": "x"}, "evaluation.args.answer"),
        ("numeric", {"answer": 1, "tolerance": -1}, "evaluation.args.tolerance"),
        ("numeric", {"answer": float("nan")}, "must be finite"),
        ("command", {"command": "true", "reward_file": "../x"}, "leaves the sandbox"),
        ("command", {"command": "true", "files": {"/x": ""}}, "'/x' leaves the sandbox"),
        ("python", {"entry": "module"}, "no package.module:function"),
        ("none", {"answer": "x"}, "unknown field"),
        ("nowhere.at.all:Rule", {}, "cannot be loaded"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(rule: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule(rule, args)


async def test_a_pattern_that_takes_for_ever_ends() -> None:
    with pytest.raises(EvaluationError, match=r"takes longer than 0\.5 s"):
        await open_rule("regex", {"pattern": "(a+)+$"}).reward(context("a" * 60 + "b", timeout_s=0.5))


@given(st.integers(-(10**12), 10**12), st.text(alphabet=" abc:=\n"))
def test_a_number_is_found_in_any_text_around_it(number: int, around: str) -> None:
    assert numbers_in(f"{around} {number} {around}") == numbers_in(f"{around} {number:,} {around}") == [number]


async def judge(rule: Rule, sandbox: Sandbox, timeout_s: float = 30) -> Verdict:
    return await rule.reward(context(sandbox=sandbox, timeout_s=timeout_s))


@pytest.mark.parametrize(
    ("args", "reward"),
    [
        ({"command": "test -e made && [ $FROM_TASK = yes ]"}, 1),
        ({"command": "test -e missing"}, 0),
        ({"command": "sh check.sh", "files": {"check.sh": "exit 7"}}, 0),
        ({"command": "kill -9 $$"}, 0),
        ({"command": "echo 0.25 >r; exit 3", "reward_file": "r"}, 0.25),
        ({"command": "cd sub && echo ' -2 ' >out", "reward_file": "sub/out"}, -2),
    ],
)
async def test_a_command_makes_the_reward(sandbox: Sandbox, args: dict[str, Any], reward: float) -> None:
    await sandbox.put_files({"made": "", "sub/x": ""})
    assert await judge(open_rule("command", args), sandbox) == Verdict(reward)


async def test_a_second_evaluation_attaches_to_the_first(sandbox: Sandbox) -> None:
    rule = open_rule("command", {"command": "echo run >>runs; sleep 0.3; echo 0.5 >r", "reward_file": "r"})
    async with asyncio.TaskGroup() as group:
        first, second = (group.create_task(judge(rule, sandbox)) for _ in range(2))
    assert first.result() == second.result() == await judge(rule, sandbox) == Verdict(0.5)
    assert await sandbox.read_file("runs", 100) == b"run\n"


async def test_a_reward_that_the_agent_wrote_does_not_count(sandbox: Sandbox) -> None:
    await sandbox.put_files({"r": "1"})
    with pytest.raises(EvaluationError, match="'r' is missing; the command wrote: why"):
        await judge(open_rule("command", {"command": "echo why >&2", "reward_file": "r"}), sandbox)


@pytest.mark.parametrize(
    ("written", "verdict"),
    [
        ('{"reward": 0.5}', Verdict(0.5)),
        (' {"reward": null, "metrics": {"passed": 3}}', Verdict(None, {"passed": 3.0})),
        ('{"reward": 1, "turn_rewards": [0, null, -0.5]}', Verdict(1.0, {}, (0.0, None, -0.5))),
    ],
)
async def test_a_command_may_write_its_verdict_as_json(sandbox: Sandbox, written: str, verdict: Verdict) -> None:
    rule = open_rule("command", {"command": "cat verdict >r", "reward_file": "r", "files": {"verdict": written}})
    assert await judge(rule, sandbox) == verdict


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("{}", "missing required field `reward`"),
        ('{"reward": "1"}', "Expected `float | null`, got `str`"),
        ('{"reward": 1, "turn_reward": []}', "unknown field `turn_reward`"),
        ('{"reward": 1, "turn_rewards": ["x"]}', r"at `\$.turn_rewards\[0\]`"),
        ('{"reward": 1, "turn_rewards": [1', "truncated"),
        ('{"reward": NaN}', "malformed"),
        ("1" + " " * 70_000, "has over 65,536 bytes"),
    ],
)
async def test_a_verdict_that_cannot_be_read_is_an_error(sandbox: Sandbox, written: str, says: str) -> None:
    rule = open_rule("command", {"command": "cat verdict >r", "reward_file": "r", "files": {"verdict": written}})
    with pytest.raises(EvaluationError, match=says):
        await judge(rule, sandbox)


@pytest.mark.parametrize("bad", [[float("nan")], ["x"], [1, True, "0"], None, "1", 5, [10**400]])
def test_turn_rewards_are_finite_numbers_or_none(bad: Any) -> None:
    with pytest.raises(EvaluationError, match=r"turn_rewards: .* \(give a list of finite numbers and None\)"):
        Verdict(1.0, {}, bad)
    assert Verdict(1.0, {}, [1, None, np.float32(0.5), True]).turn_rewards == (1.0, None, 0.5, 1.0)


@pytest.mark.parametrize("text", ["", "nan", "inf", "1 2", "one"])
async def test_a_reward_file_without_a_finite_number_is_an_error(sandbox: Sandbox, text: str) -> None:
    rule = open_rule("command", {"command": f"printf '{text}' >r", "reward_file": "r"})
    with pytest.raises(EvaluationError, match="no finite number"):
        await judge(rule, sandbox)


async def test_a_command_that_is_late_or_lost_gives_no_reward(sandbox: Sandbox) -> None:
    with pytest.raises(EvaluationError, match=r"did not end within 0\.2 s"):
        await judge(open_rule("command", {"command": "sleep 1000"}), sandbox, timeout_s=0.2)
    await sandbox.destroy()
    with pytest.raises(SandboxError):
        await judge(open_rule("command", {"command": "true"}), sandbox)
    with pytest.raises(EvaluationError, match="needs a sandbox"):
        await open_rule("command", {"command": "true"}).reward(context())


GRADERS = """
import asyncio, time
def length(task, result, workdir): return len(result.answer)
async def later(task, result, workdir):
    await asyncio.sleep(0)
    return None, {"turns": 3}
def by_turn(task, result, workdir): return 1, {}, [0.5, None, 1]
def no_turns(task, result, workdir): return None, {"turns": 3}, None
def bad_turn(task, result, workdir): return 1, {}, [0.5, "good"]
def too_much(task, result, workdir): return 1, {}, [], []
def wrong(task, result, workdir): return "good"
def infinite(task, result, workdir): return float("inf")
def fails(task, result, workdir): raise KeyError("k")
def hangs(task, result, workdir): time.sleep(1000)
class Box:
    @staticmethod
    def inside(task, result, workdir): return workdir is None
"""


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "graders_of_a_test.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "graders_of_a_test", raising=False)
    return "graders_of_a_test"


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        ("length", Verdict(3.0)),
        ("later", Verdict(None, {"turns": 3.0})),
        ("Box.inside", Verdict(1.0)),
        ("by_turn", Verdict(1.0, {}, (0.5, None, 1.0))),
        ("no_turns", Verdict(None, {"turns": 3.0})),
    ],
)
async def test_a_python_function_makes_the_reward(graders: str, function: str, verdict: Verdict) -> None:
    assert await open_rule("python", {"entry": f"{graders}:{function}"}).reward(context("abc")) == verdict


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("wrong", "returned 'good'"),
        ("bad_turn", "turn_rewards: 'good' is no finite number"),
        ("too_much", "is no finite number"),
        ("infinite", "returned inf"),
        ("fails", "failed: KeyError: 'k'"),
        ("missing", "cannot be loaded"),
    ],
)
async def test_a_python_function_that_fails_is_an_error(graders: str, function: str, says: str) -> None:
    with pytest.raises(EvaluationError, match=says):
        await open_rule("python", {"entry": f"{graders}:{function}"}).reward(context())


async def test_a_python_function_that_hangs_does_not_hold_the_worker(graders: str) -> None:
    with pytest.raises(EvaluationError, match=r"did not return within 0\.1 s"):
        await open_rule("python", {"entry": f"{graders}:hangs"}).reward(context(timeout_s=0.1))
