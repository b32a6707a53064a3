"""`rollyard replay` as a user sees it, over a real bus and over an archive without one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollyard.cli import main
from rollyard.cli import replay as command
from rollyard.pipeline.archive.folder import RunArchive
from rollyard.pipeline.archive.writer import ArchiveWriter
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.call import CallIntent
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Run
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent

Done = subprocess.CompletedProcess[str]
Replay = Callable[..., Awaitable[Done]]
NOWHERE = "nats://127.0.0.1:1"


@pytest.fixture
async def replay(nats: EmbeddedNats, tmp_path: Path) -> Replay:
    """Runs the command in a process of its own, in an empty folder."""
    (tmp_path / "here").mkdir()

    async def run(*arguments: str, url: str = nats.url) -> Done:
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "rollyard", "replay", "--run", "run", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path / "here",
            env=os.environ | {"ROLLYARD__NATS__URL": url},
            check=False,
        )

    return run


def played(new_session: Any, index: int) -> Any:
    """A main call, a title, a second main call; the answer is the index."""
    session = new_session(random.Random(index), rollout=Rollout.of("run", "task", index, 9))
    first = session.ask(None)
    title = session.ask(None)
    session.ask(first)
    for call_id in list(session.owed):
        session.log(session.owed.pop(call_id))

    def change(event: Any) -> Any:
        if isinstance(event, CallIntent) and event.call_id == title.call_id:
            return structs.replace(event, scenario="title")
        if isinstance(event, RolloutEvent) and event.kind == "ran":
            return structs.replace(event, result=AgentResult(exit_code=0, answer=str(index)))
        return event

    session.change = change
    return session


@pytest.fixture
async def logged(bus: Bus, new_session: Any, log_session: Any) -> list[str]:
    """Three rollouts of version 1, of which the last was given up; their ids."""
    await Bucket[Run](bus, subjects.RUNS, Run).put("run", Run(run="run"))
    gave_up = Failure.of("infra", "aggregate was tried 5 times")
    rollouts = []
    for index in range(3):
        session = played(new_session, index)
        lost = {"status": "failed", "failure": gave_up, "cut_seq": 0} if index == 2 else {}
        commit = session.close(0.25, stitcher="1", **lost)
        session.events = [(seq, session.change(event)) for seq, event in session.events]
        rollouts.append((await log_session(session, commit)).rollout_id)
    return rollouts


async def test_it_compares_with_the_commits(replay: Replay, logged: list[str]) -> None:
    done = await replay()
    assert (done.returncode, done.stdout) == (0, "4 of 4 samples of 3 rollouts equal their commits.\n")
    assert json.loads((await replay("--json")).stdout)["equal"] == 4


async def test_a_run_without_events_is_told_from_one_that_is_equal(bus: Bus, replay: Replay) -> None:
    await Bucket[Run](bus, subjects.RUNS, Run).put("run", Run(run="run"))
    done = await replay()
    assert (done.returncode, done.stdout) == (5, "")
    assert "The log holds no rollout of run 'run': it has just begun, or was purged" in done.stderr
    assert "(--from DIR reads its archive)" in done.stderr


async def test_a_summary_of_samples_made_anew(replay: Replay, logged: list[str], tmp_path: Path) -> None:
    done = await replay("--stitcher", "2")
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first.startswith("2 samples with ")
    assert first.endswith(" trained tokens, of 3 rollouts; 2 have a reward, 0.250 on average.")
    assert second == "Calls left out: 2 scenario_title"

    policy = tmp_path / "policy.toml"
    policy.write_text('scenarios = ["main", "title"]\nreward = "main"\n')
    found = json.loads((await replay("--policy", str(policy), "--recover", "--json")).stdout)
    assert (found["made"]["samples"], found["recovered"], found["excluded"]) == (6, 1, {})


async def test_a_diff_for_people_and_for_programs(replay: Replay, logged: list[str]) -> None:
    done = await replay("--stitcher", "2", "--recover", "--diff")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "3 of 3 rollouts change." in lines
    (before,) = (line.split() for line in lines if line.startswith("as committed"))
    (after,) = (line.split() for line in lines if line.startswith("anew"))
    assert (before[2], before[4:], after[1], after[3:]) == ("4", ["2", "0.25"], "3", ["3", "0.25"])
    (added,) = (line.split() for line in lines if line.startswith("samples added") and "->" not in line)
    (removed,) = (line.split() for line in lines if line.startswith("samples removed") and "->" not in line)
    assert int(before[3]) + int(added[3]) - int(removed[3]) == int(after[2])
    (example,) = (line for line in lines if line.startswith("samples added") and "->" in line)
    assert example.split()[2:6] == [logged[2], "-", "->", "0"]
    assert f"- -> {added[3]} " in example

    *changes, whole = map(
        json.loads, (await replay("--stitcher", "2", "--recover", "--diff", "--json")).stdout.splitlines()
    )
    assert sorted(change["kinds"] for change in changes) == [["added"], ["removed"], ["removed"]]
    assert whole["diff"]["kinds"]["removed"]["samples"] == 2
    assert whole["diff"]["after"]["samples"] == whole["made"]["samples"] == 3


async def test_the_commands_of_the_manual_write_samples_and_ask_them(
    replay: Replay, logged: list[str], tmp_path: Path
) -> None:
    manual = (Path(__file__).parents[2] / "docs/samples.md").read_text()
    (written,) = re.findall(r"^    rollyard replay --run demo (.*--out .*)$", manual, re.MULTILINE)
    (asked,) = re.findall(r"^    rollyard (samples sql --data anew .*)$", manual, re.MULTILINE)
    here = tmp_path / "here"
    (here / "policy.toml").write_text('scenarios = ["title"]\n')
    done = await replay(*shlex.split(written))
    assert done.returncode == 0
    assert done.stdout.endswith("Written to anew/samples, as Parquet.\n")
    found = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "rollyard", *shlex.split(asked), "--json"],
        capture_output=True,
        text=True,
        cwd=here,
        check=True,
    )
    note = json.loads((here / "anew/samples/replay.json").read_text())
    assert (note["run"], note["made_by"]) == ("run", {"stitcher": "2", "policy": {"scenarios": ["title"]}})
    made = note["report"]["made"]
    assert made["samples"] == 2
    assert list(json.loads(found.stdout).values()) == [made["samples"], made["trained_tokens"]]
    again = await replay("--out", "anew/samples")
    assert (again.returncode, again.stdout) == (3, "")
    assert "anew/samples holds something already (give --out a new folder" in again.stderr


async def test_rewards_are_made_anew(replay: Replay, logged: list[str], tmp_path: Path) -> None:
    rule = tmp_path / "rule.json"
    rule.write_text('{"rule": "exact", "args": {"answer": "1"}}')
    done = await replay("--reward", str(rule), "--diff")
    assert done.returncode == 0
    assert "2 have a reward, 0.500 on average." in done.stdout
    rewards = [
        line.split()[-3:] for line in done.stdout.splitlines() if line.startswith("other reward") and "->" in line
    ]
    assert rewards == [["0.25", "->", "0"]] * 2 + [["0.25", "->", "1"]] * 2
    rule.write_text('{"rule": "exact"}')
    done = await replay("--reward", str(rule))
    assert done.returncode == 1
    assert "The rule failed for 2 rollouts, which have no reward:\n  2 times: " in done.stdout


async def test_an_archive_needs_no_bus(bus: Bus, replay: Replay, logged: list[str], tmp_path: Path) -> None:
    archive = RunArchive(tmp_path / "archive", "run")
    with archive.locked():
        await ArchiveWriter(bus, archive).run()
    kept = str(tmp_path / "archive")
    done = await replay("--from", kept, url=NOWHERE)
    assert (done.returncode, done.stdout) == (0, "4 of 4 samples of 3 rollouts equal their commits.\n")
    rule = tmp_path / "rule.toml"
    rule.write_text('rule = "numeric"\n[args]\nanswer = 1\n')
    options = ("--stitcher", "2", "--recover", "--reward", str(rule), "--diff", "--json")
    there, here = await replay(*options, "--from", kept, url=NOWHERE), await replay(*options)
    assert (there.stdout, there.returncode) == (here.stdout, 0)
    missing = await replay("--from", str(tmp_path / "nowhere"), url=NOWHERE)
    assert (missing.returncode, "there is no archive of run 'run'" in missing.stderr) == (1, True)
    rule.write_text('rule = "exact"\n')
    incomplete = await replay("--from", kept, "--reward", str(rule), url=NOWHERE)
    assert (incomplete.returncode, "give `answer` or `answers`" in incomplete.stderr) == (2, True)


WRONG = [
    (["--stitcher", "9"], "", "--stitcher: there is no version '9' (here are 1, 2)"),
    (["--diff"], "", "--diff has nothing to compare the committed samples with (say what is to be another:"),
    (["--policy", "none"], "", "cannot read none: No such file or directory"),
    (["--policy", "spec"], "max_token = 3", "spec: max_token: unknown field; did you mean `max_tokens`?"),
    (["--policy", "spec"], "max_tokens = 1", "spec: max_tokens: must be an integer >= 2, is 1"),
    (["--policy", "spec"], '{"failed": "keep"', "spec: malformed JSON: Expecting ',' delimiter"),
    (["--policy", "spec"], "failed: keep", "spec: malformed TOML: Expected '=' after a key"),
    (["--policy", "spec"], 'scenarios = ["mane"]', "spec: scenarios[0]: "),
    (
        ["--policy", "spec"],
        'lenience_off = ["spaces"]',
        "spec: lenience_off: 'spaces' is no rule of lenient matching; ",
    ),
    (["--reward", "spec"], '{"rule": 3}', "spec: rule: must be a string, is 3"),
]


@pytest.mark.parametrize("given", WRONG)
def test_wrong_options_are_named_with_what_mends_them(
    given: tuple[list[str], str, str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    arguments, content, says = given
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLYARD__NATS__URL", NOWHERE)
    Path("spec").write_text(content)
    assert main(["replay", "--run", "run", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"rollyard: {says}")


async def test_a_rule_that_needs_a_sandbox_is_refused(replay: Replay, logged: list[str], tmp_path: Path) -> None:
    rule = tmp_path / "rule.json"
    rule.write_text('{"rule": "command", "args": {"command": "true"}}')
    done = await replay("--reward", str(rule), "--out", "made")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"rollyard: {rule}: rule: 'command' works in the agent's sandbox, which is gone (" in done.stderr
    assert not (tmp_path / "here/made").exists()


def test_progress_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0, 12.5])
    monkeypatch.setattr("rollyard.cli.replay.time.monotonic", lambda: next(times))
    tell = command._progress("run")
    for number in range(1, 5):
        tell(1000 * number, 1500 * number, 30_000_000 * number)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "run: 2,000 rollouts, 3,000 samples, 60 MB of events, 10 MB/s",
        "run: 4,000 rollouts, 6,000 samples, 120 MB of events, 10 MB/s",
    ]
