"""Rule `harbor`: the contract of the reward file, and what goes wrong with it."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.stages.evaluator import open_rule
from rollyard.stages.evaluators.harbor import json_rewards, text_reward
from rollyard.stages.evaluators.verifier import VerifierLate


def suite(script: str, **more: Any) -> dict[str, Any]:
    return {"tests": {"test.sh": f'#!/bin/sh\nlogs="$ROLLYARD_LOGS/verifier"\n{script}\n'}, **more}


@pytest.mark.parametrize(
    ("script", "reward", "rewards"),
    [
        ("echo 1 >$logs/reward.txt; exit 1", 1.0, {"reward": 1.0}),
        ("echo ' 0.25 ' >$logs/reward.txt", 0.25, {"reward": 0.25}),
        ('echo 7 >$logs/reward.txt; echo \'{"reward": 0.5, "style": 1}\' >$logs/reward.json', 0.5, None),
        ('echo \'{"a": 1, "b": 0}\' >$logs/reward.json', 0.5, {"a": 1.0, "b": 0.0}),
        ("echo '{\"only\": -3}' >$logs/reward.json", -3.0, {"only": -3.0}),
        ("echo 0.75 >$logs/reward.json", 0.75, {"reward": 0.75}),
        ("echo '{\"reward\": true}' >$logs/reward.json", 1.0, {"reward": 1.0}),
    ],
)
async def test_the_reward_file_counts_and_nothing_else(
    court: Any, script: str, reward: float, rewards: dict[str, float] | None
) -> None:
    verdict = await court.judge("harbor", suite(script))
    assert verdict.reward == reward
    assert rewards is None or verdict.rewards == rewards


async def test_tests_run_in_the_working_directory_with_their_files_and_environment(court: Any) -> None:
    await court.sandbox.put_files({"made.txt": "by the agent"})
    script = """
        grep -q agent made.txt && "$ROLLYARD_TESTS/tool.sh" && cmp "$ROLLYARD_TESTS/data/b" made.bin &&
        [ "$FROM_TASK $FROM_TESTS" = "yes no" ] && echo 1 >$logs/reward.txt; echo said; echo so >&2
    """
    await court.sandbox.put_files({"made.bin": b"\0\xff"})
    args = suite(script, env={"FROM_TESTS": "no"}, binary_tests={"data/b": b64encode(b"\0\xff").decode()})
    args["tests"]["tool.sh"] = "#!/bin/sh\nexit 0\n"
    verdict = await court.judge("harbor", args, spec={"env": {"FROM_TASK": "yes", "FROM_TESTS": "yes"}})
    assert (verdict.reward, verdict.log) == (1.0, "said\nso")


async def test_rewards_that_were_there_before_do_not_count(court: Any) -> None:
    planted = {f"harbor/logs/verifier/reward.{kind}": "1" for kind in ("txt", "json")}
    await court.sandbox.put_files(planted, base="home")
    with pytest.raises(EvaluationError, match=r"neither .*/reward.json nor reward.txt; test.sh wrote: why"):
        await court.judge("harbor", suite("echo why"))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("true", "has written neither"),
        ("touch $logs/reward.txt", "reward.txt is empty"),
        ("echo nan >$logs/reward.txt", "no finite number"),
        ("echo -inf >$logs/reward.txt", "no finite number"),
        ("echo good >$logs/reward.txt", "is no number"),
        ("echo 1 >$logs/reward.txt; touch $logs/reward.json", "reward.json is empty"),
        ("echo '{}' >$logs/reward.json", "names no reward"),
        ("echo '{\"reward\": NaN}' >$logs/reward.json", "NaN is no finite number"),
        ("echo '{\"reward\": 1e999}' >$logs/reward.json", "no finite number"),
        ('echo \'{"reward": "1"}\' >$logs/reward.json', "no finite number"),
        ("echo '{\"reward\": null}' >$logs/reward.json", "no finite number"),
        ("echo '[1]' >$logs/reward.json", "no finite number"),
        ("head -c 2000000 /dev/zero | tr '\\0' ' ' >$logs/reward.json", "over 1,048,576 bytes"),
        ("rm -rf $ROLLYARD_TESTS $ROLLYARD_LOGS", "has written neither"),
        ("kill -9 $$", "has written neither"),
    ],
)
async def test_what_is_no_reward_is_a_failure_and_no_zero(court: Any, script: str, says: str) -> None:
    with pytest.raises(EvaluationError, match=says):
        await court.judge("harbor", suite(script))


async def test_a_verifier_that_hangs_is_ended_with_all_it_started(court: Any) -> None:
    args = suite("echo begun; (trap '' TERM; sleep 1000) & sleep 1000", timeout_s=0.5)
    with pytest.raises(VerifierLate, match=r"did not end within 0.5 s; it had written: begun"):
        await court.judge("harbor", args)
    assert (await court.judge("harbor", args | {"timeout_reward": 0.0}, process="again")).reward == 0.0


async def test_a_verifier_that_floods_gets_its_reward_and_a_short_log(court: Any) -> None:
    args = suite("yes it is so | head -c 30000000; echo 1 >$logs/reward.txt; echo end")
    verdict = await court.judge("harbor", args)
    assert (verdict.reward, verdict.log[-3:]) == (1.0, "end")
    assert 16_000 < len(verdict.log) <= 16_384


async def test_what_outlives_the_verifier_writes_no_reward(court: Any) -> None:
    script = "echo 0 >$logs/reward.txt; (sleep 0.3; echo 1 >$logs/reward.txt) >/dev/null 2>&1 &"
    assert (await court.judge("harbor", suite(script))).reward == 0.0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tests": {}}, "`tests` has no test.sh"),
        (suite("", binary_tests={"x": "§"}), "no base64"),
        (suite("", copy=["x"]), "absolute paths"),
        (suite("", binary_tests={"../x": ""}), "leaves the sandbox"),
    ],
)
def test_what_cannot_be_asked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule("harbor", args)


@given(st.binary(max_size=40))
def test_any_content_gives_finite_rewards_or_an_error(content: bytes) -> None:
    for parse in (json_rewards, text_reward):
        try:
            rewards = parse(content)
        except ValueError:
            continue
        assert rewards
        assert all(abs(value) < float("inf") for value in rewards.values())
