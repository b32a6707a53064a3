"""Rule `composite`: several rewards made into one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.stages.evaluator import isolation_of, open_rule
from rollyard.stages.evaluators.composite import Part, combined

TRUE = {"rule": "command", "args": {"command": "true"}}
FALSE = {"rule": "command", "args": {"command": "echo no; false"}, "name": "fails"}
RIGHT = {"rule": "exact", "args": {"answer": "42"}}
NAMED = {"rule": "command", "name": "named", "args": {"command": "echo '%s' >r", "reward_file": "r"}}
NAMED["args"]["command"] %= '{"reward": 0.5, "rewards": {"a": 1}, "metrics": {"m": 2}}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "reward"),
    [
        ({"parts": [TRUE, FALSE]}, 0.5),
        ({"parts": [TRUE | {"weight": 3}, FALSE]}, 0.75),
        ({"parts": [TRUE | {"weight": 3}, RIGHT], "combine": "sum"}, 4.0),
        ({"parts": [TRUE, NAMED], "combine": "product"}, 0.5),
        ({"parts": [TRUE, FALSE], "combine": "min"}, 0.0),
        ({"parts": [TRUE, FALSE], "combine": "max"}, 1.0),
        ({"parts": [RIGHT | {"gate": 0.5}, NAMED]}, 0.75),
        ({"parts": [FALSE | {"gate": 0.5}, NAMED]}, 0.0),
    ],
)
async def test_rewards_are_combined(court: Any, args: dict[str, Any], reward: float) -> None:
    assert (await court.judge("composite", args, answer="42")).reward == reward


async def test_rewards_metrics_and_logs_of_the_parts_are_kept(court: Any) -> None:
    verdict = await court.judge("composite", {"parts": [NAMED, FALSE]})
    assert verdict.rewards == {"named": 0.5, "named.a": 1.0, "fails": 0.0}
    assert (verdict.metrics, verdict.log) == ({"named.m": 2.0}, "== fails\nno")


async def test_behind_a_gate_that_is_shut_nothing_is_judged(court: Any) -> None:
    parts = [FALSE | {"gate": 1}, {"rule": "command", "name": "later", "args": {"command": "touch ran"}}]
    verdict = await court.judge("composite", {"parts": parts})
    assert (verdict.reward, verdict.rewards, verdict.metrics) == (0.0, {"fails": 0.0}, {"gated": 1.0})
    assert await court.sandbox.read_file("ran", 1) is None


async def test_a_part_that_fails_or_gives_none_fails_the_whole(court: Any) -> None:
    with pytest.raises(EvaluationError, match="'none' gives no reward"):
        await court.judge("composite", {"parts": [TRUE, {"rule": "none"}]})
    with pytest.raises(EvaluationError, match="is missing"):
        await court.judge("composite", {"parts": [TRUE | {"args": {"command": "true", "reward_file": "r"}}]})


@pytest.mark.parametrize(
    ("parts", "isolation"),
    [([RIGHT], "none"), ([RIGHT, TRUE], "fresh"), ([RIGHT, {"rule": "composite", "args": {"parts": [TRUE]}}], "fresh")],
)
def test_the_sandbox_is_the_strictest_that_a_part_asks_for(parts: list[Any], isolation: str) -> None:
    assert isolation_of(open_rule("composite", {"parts": parts})) == isolation


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"parts": []}, "length >= 1"),
        ({"parts": [TRUE, TRUE]}, "two parts have the same name"),
        ({"parts": [{"rule": "exakt"}]}, r"parts\[0\]: no evaluation rule is called 'exakt' \(did you mean"),
        ({"parts": [RIGHT, {"rule": "exact"}]}, "two parts have the same name"),
        ({"parts": [RIGHT, {"rule": "regex"}]}, r"parts\[1\]: .*missing required field `pattern`"),
        ({"parts": [RIGHT | {"weight": 0}]}, "all weights are 0"),
        ({"parts": [RIGHT | {"weight": -1}]}, "weight"),
        (
            {"parts": [TRUE, {"rule": "code", "args": {"cases": [{"output": ""}]}}]},
            "some parts judge in a sandbox with the agent's files",
        ),
    ],
)
def test_what_cannot_be_asked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule("composite", args)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 5)), min_size=1, max_size=6))
def test_a_mean_lies_between_the_rewards(pairs: list[tuple[float, float]]) -> None:
    parts = [Part(rule="exact", name=str(number), weight=weight) for number, (_, weight) in enumerate(pairs)]
    rewards = {str(number): reward for number, (reward, _) in enumerate(pairs)}
    low, mean, high = (combined(how, parts, rewards) for how in ("min", "mean", "max"))
    assert low - 1e-9 <= mean <= high + 1e-9
    assert math.isclose(
        combined("sum", parts, rewards), mean * math.fsum(weight for _, weight in pairs), abs_tol=1e-9, rel_tol=1e-9
    )
