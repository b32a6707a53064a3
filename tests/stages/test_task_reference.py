"""docs/task.md: what it says of tasks, harnesses and rules is what the code takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rollyard.harnesses.harness import HARNESSES
from rollyard.pipeline.taskfile import check_tasks
from rollyard.schemas.policy import SamplePolicy
from rollyard.stages.evaluator import RULES
from rollyard.stages.plugin_check import check_task
from rollyard.stages.task_reference import reference

PAGE = (Path(__file__).resolve().parents[2] / "docs/task.md").read_text()


def test_the_page_holds_the_reference_of_the_code() -> None:
    assert PAGE.endswith("\n" + reference() + "\n"), (
        "write the output of `python -m rollyard.stages.task_reference` to the end of docs/task.md"
    )


def test_it_names_every_field_harness_and_rule() -> None:
    said = reference()
    assert "| `prompt` | string | required | what the agent is asked, at most 10 MB of UTF-8 |" in said
    assert "| `temperature` | number or null, 0 to 10 | `null` | softmax temperature; null: the agent's |" in said
    assert "| `answers` | list of strings | `[]` | accepted answers |" in said
    assert re.findall(r"^### Harness (\w+)$", said, re.MULTILINE) == list(HARNESSES.shipped)
    assert re.findall(r"^### Rule (\w+)$", said, re.MULTILINE) == list(RULES.shipped)


def test_a_part_that_may_be_left_out_has_a_table_too() -> None:
    _, _, table = reference().partition("\n### samples\n")
    named = re.findall(r"^\| `(\w+)` \|", table.partition("\n#")[0], re.MULTILINE)
    assert named == list(SamplePolicy.__struct_fields__)


def test_every_field_says_what_it_means() -> None:
    assert [line for line in reference().splitlines() if line.endswith("|  |")] == []


def test_its_example_is_a_task() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (task,) = check_tasks([json.loads(example)], check_task).tasks
    assert task.id == "fix-add"
