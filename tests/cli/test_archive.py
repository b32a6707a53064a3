"""`rollyard archive` as a user sees it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Run
from rollyard.schemas.rollout import Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sample import Commit

RUN = "a run, oddly named"


@pytest.fixture(autouse=True)
def at_the_bus(bus: Bus, nats: EmbeddedNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLYARD__NATS__URL", nats.url)
    monkeypatch.setenv("ROLLYARD__STORE__BLOBS", str(tmp_path / "blobs"))


async def rollyard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollyard", *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)


async def failed_rollout(bus: Bus, position: str = "ended") -> Rollout:
    """A rollout that failed in INIT: two events."""
    rollout = Rollout.of(RUN, "t", 0, 1)
    life, commit = (subjects.log_subject(RUN, rollout.rollout_id, kind) for kind in ("life", "commit"))
    await bus.publish(life, encode(RolloutEvent(kind="failed", rollout=rollout, attempt=1, at_ms=1)))
    facts = {"task_id": "t", "group_id": "t", "group_size": 1, "index": 0, "attempt": 1}
    await bus.create(commit, encode(Commit(run=RUN, rollout_id=rollout.rollout_id, status="failed", **facts)))
    state = RolloutState(rollout=rollout, position=position)
    await Bucket(bus, subjects.ROLLOUTS, RolloutState).put(subjects.rollout_key(RUN, rollout.rollout_id), state)
    await Bucket(bus, subjects.RUNS, Run).put(subjects.token(RUN), Run(run=RUN))
    return rollout


async def test_archive_verify_and_purge(bus: Bus) -> None:
    await failed_rollout(bus)
    would = await rollyard("archive", "--run", RUN, "--purge", "--dry-run")
    assert would.stdout.splitlines()[0].startswith("2 new events would be archived")
    assert "All of it would be compared with the log.\n2 events would be removed from the log.\n" in would.stdout
    assert not Path(".rollyard").exists()

    done = await rollyard("archive", "--run", RUN)
    folder = Path(".rollyard/archive") / f"run={subjects.token(RUN)}"
    assert done.stdout.splitlines()[1].startswith(f"{folder}: 2 events in 1 files")
    report = json.loads((await rollyard("archive", "--run", RUN, "--verify", "--json")).stdout)
    assert (report["run"], report["new_events"], report["verified_seq"]) == (RUN, 0, 2)
    asked = await rollyard("samples", "sql", "select run, type from events order by seq", "--json")
    assert [json.loads(line) for line in asked.stdout.splitlines()] == [
        {"run": RUN, "type": "failed"},
        {"run": RUN, "type": "commit"},
    ]
    purged = await rollyard("archive", "--run", RUN, "--purge")
    assert "All of it was compared with the log, and is equal.\n2 events removed from the log.\n" in purged.stdout
    assert await bus.subjects(subjects.LOG, ">") == {}
    replayed = await rollyard("replay", "--run", RUN, "--from", ".rollyard/archive")
    assert replayed.stdout == "0 of 0 samples of 1 rollouts equal their commits.\n"


async def test_what_is_wrong_is_one_line(bus: Bus, tmp_path: Path) -> None:
    rollout = await failed_rollout(bus, "eval")
    refused = await rollyard("archive", "--run", RUN, "--purge", "--to", "there")
    assert (refused.returncode, refused.stdout) == (1, "")
    said = f"rollyard: run {RUN!r} cannot be purged: 1 rollouts have not ended ({rollout.rollout_id}) (wait for its end"
    assert refused.stderr.startswith(said)
    would = await rollyard("archive", "--run", RUN, "--purge", "--to", "there", "--dry-run")
    assert f"Nothing would be purged: run {RUN!r} cannot be purged: 1 rollouts" in would.stdout
    assert (await rollyard("archive", "--run", RUN, "--to", "there")).returncode == 0
    (path,) = Path("there").glob("run=*/events-*.parquet")
    path.write_bytes(path.read_bytes()[:-1] + b"2")
    damaged = await rollyard("archive", "--run", RUN, "--to", "there", "--verify")
    assert (damaged.returncode, damaged.stdout) == (1, "")
    assert f"{path} is not what was written" in damaged.stderr
    unknown = await rollyard("archive", "--run", "nobody")
    assert (unknown.returncode, "there is no run 'nobody'" in unknown.stderr) == (2, True)


def test_without_a_bus_the_exit_code_is_4(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD__NATS__URL", "nats://127.0.0.1:1")
    assert main(["archive", "--run", "r"]) == 4
    assert "cannot reach NATS" in capsys.readouterr().err
