"""`rollyard demo` from the first line to the last, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
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


def check_summary(summary: dict[str, Any], folder: Path) -> None:
    counts = [summary[key] for key in ("tasks", "rollouts", "completed", "samples", "groups")]
    assert counts == [2, 4, 4, 4, 2]
    assert summary["data"] == str(folder / "data")
    files = list(Path("/").glob(summary["parquet"].lstrip("/")))
    assert sum(pq.read_metadata(file).num_rows for file in files) == 4


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
def test_a_demo_on_the_local_model(tmp_path: Path) -> None:
    summary, said = demo(tmp_path)
    check_summary(summary, tmp_path)
    assert "<|im_start|>assistant\n    ⟦" in said


def test_the_tasks_that_ship_are_fine() -> None:
    tasks = read_task_file(demo_tasks(), check_task).tasks
    assert {task.group_size for task in tasks} == {8}
    assert {task.agent.harness for task in tasks} == {"ask", "bash"}
