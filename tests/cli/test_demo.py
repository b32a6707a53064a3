"""`rollyard demo` from the first line to the last, with real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollyard.cli.demo import demo_tasks
from rollyard.pipeline.taskfile import read_task_file
from rollyard.stages.plugin_check import check_task

TASKS = """\
{"id": "sum", "prompt": "What is 2 + 3?", "agent": {"sampling": {"temperature": 0.7, "max_tokens": 12}}, \
"evaluation": {"rule": "contains", "args": {"answer": "5"}}, "group_size": 2}
{"id": "word", "prompt": "Say a word.", "agent": {"sampling": {"temperature": 0.7, "max_tokens": 12}}, "group_size": 2}
"""


def demo(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run it; returns its last line and everything that it said."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text(TASKS)
    command = [sys.executable, "-m", "rollyard", "demo", "--data", str(folder / "data"), "--tasks", str(tasks)]
    done = subprocess.run([*command, "--json", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary, done.stdout


def check_summary(summary: dict[str, Any], folder: Path, *, untrainable: int = 0) -> None:
    counts = [summary[key] for key in ("tasks", "rollouts", "completed", "samples", "groups")]
    assert counts == [2, 4, 4, 4 - untrainable, 2]
    assert summary["data"] == str(folder / "data")
    files = list(Path("/").glob(summary["parquet"].lstrip("/")))
    assert sum(pq.read_metadata(file).num_rows for file in files) == 4 - untrainable


def untrainable_calls(summary: dict[str, Any]) -> int:
    """Calls left out since llama.cpp did not tell all their ids: about one reply in a hundred has a rare character."""
    parts = sorted(Path(summary["data"]).glob(f"samples/rollouts/run={summary['run']}/part-*.parquet"))
    excluded = [reasons for part in parts for reasons in pq.read_table(part)["excluded"].to_pylist()]
    assert len(excluded) == 4
    assert {reason for reasons in excluded for reason, _ in reasons} <= {"untrainable"}
    return sum(count for reasons in excluded for _, count in reasons)


@pytest.mark.model
def test_a_demo_and_a_second_one_on_the_same_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"conversations": [{"turns": [{"content": "It is 5."}]}]}')
    first, said = demo(tmp_path, "--scripted", str(script))
    check_summary(first, tmp_path)
    assert first["groups_mixed"] == 0
    for part in ("4/4 rollouts", "rewards", "from samples where run", "⟦It is 5.", "What happened"):
        assert part in said
    second, _ = demo(tmp_path, "--scripted", str(script))
    check_summary(second, tmp_path)
    assert second["run"] != first["run"]


@pytest.mark.model
def test_ctrl_c_ends_the_agents_too(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"conversations": [{"turns": [{"content": "It is 5.", "delay_s": 300}]}]}')
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    data = tmp_path / "data"
    command = [sys.executable, "-m", "rollyard", "demo", "--data", str(data), "--tasks", str(tmp_path / "tasks.jsonl")]
    process = subprocess.Popen([*command, "--scripted", str(script)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(data.glob("sandboxes/r*/control/agent/pid")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said.splitlines()[-1]) == (130, "Stopped before the end; `make demo` starts a new run.")
    assert list(data.glob("sandboxes/r*")) == []
    assert set(json.loads((data / "state.json").read_text())["children"].values()) == {None}
    sql = "select status, count(*) as n from rollouts group by status"
    ended = subprocess.run(
        [sys.executable, "-m", "rollyard", "samples", "sql", sql, "--data", str(data), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout) == {"status": "cancelled", "n": 4}


@pytest.mark.model
def test_a_demo_on_the_local_model(tmp_path: Path) -> None:
    summary, said = demo(tmp_path)
    untrainable = untrainable_calls(summary)
    assert untrainable < 4
    check_summary(summary, tmp_path, untrainable=untrainable)
    assert "<|im_start|>assistant\n    ⟦" in said


def test_the_tasks_that_ship_are_fine() -> None:
    tasks = read_task_file(demo_tasks(), check_task).tasks
    assert {task.group_size for task in tasks} == {8}
    assert {task.agent.harness for task in tasks} == {"ask", "bash"}
