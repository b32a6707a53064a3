"""The task set that ships with `rollyard demo`."""

from __future__ import annotations

from pathlib import Path

import rollyard.harnesses
from rollyard.pipeline.taskfile import read_task_file
from rollyard.stages.plugin_check import check_task

DEMO = Path(rollyard.harnesses.__file__).with_name("demo_tasks.jsonl")


def test_every_demo_task_is_acceptable() -> None:
    tasks = read_task_file(DEMO, check_task).tasks
    assert {task.agent.harness for task in tasks} == {"ask", "bash"}
    assert {task.group_size for task in tasks} == {8}
    assert all((task.agent.sampling.max_tokens or 999) <= 32 for task in tasks)


def test_a_model_that_writes_commands_is_kept_inside_its_folder() -> None:
    tasks = [task for task in read_task_file(DEMO).tasks if task.agent.harness == "bash"]
    assert all(task.agent.args["programs"] for task in tasks)
