"""Rows as of SWE-bench."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline.importers.swe import SweOptions, import_swe, swe_task
from rollyard.schemas.sandbox import Repository, SandboxSpec
from rollyard.stages.evaluator import open_rule
from rollyard.stages.evaluators.swe import Swe

ROW: dict[str, Any] = {
    "instance_id": "yard__calc-7",
    "repo": "yard/calc",
    "base_commit": "0123abc",
    "problem_statement": "add() is {version} wrong",
    "patch": "diff --git a/x b/x\n{model}\n",
    "test_patch": "diff --git a/t b/t\n",
    "FAIL_TO_PASS": '["t.py::a"]',
    "PASS_TO_PASS": ["t.py::b", "t.py::c"],
    "version": "1.2",
}
DOCKER = SandboxSpec(backend="docker", workdir="/testbed")


def options(**more: Any) -> SweOptions:
    return SweOptions(sandbox=DOCKER, **{"image": "swe:{instance_id}", **more})


def test_a_row_becomes_a_task() -> None:
    task = swe_task(ROW, options(command="run {files}", group_size=2)).task
    assert task is not None
    assert (task.id, task.group_size, task.metadata) == (
        "yard__calc-7",
        2,
        {"repo": "yard/calc", "base_commit": "0123abc", "version": "1.2"},
    )
    assert "The repository yard/calc is" in task.prompt
    assert "add() is {version} wrong" in task.prompt, "what a column says is not filled in again"
    assert (task.sandbox.image, task.sandbox.workdir, task.sandbox.repository) == ("swe:yard__calc-7", "/testbed", None)
    rule = open_rule("swe", task.evaluation.args)
    assert isinstance(rule, Swe)
    assert (rule.fail_to_pass, rule.pass_to_pass, rule.command) == (("t.py::a",), ("t.py::b", "t.py::c"), "run {files}")
    assert "diff --git a/x" not in json.dumps(task.evaluation.args) + task.prompt, "the solution is in the task"


def test_a_repository_may_be_cloned() -> None:
    task = swe_task(ROW, options(image="", clone="file:///mirror/{repo}.git")).task
    assert task is not None
    assert task.sandbox.repository == Repository(url="file:///mirror/yard/calc.git", commit="0123abc")


def test_the_rows_own_image_and_the_oracle() -> None:
    task = swe_task(ROW | {"image_name": "own"}, options(image="", oracle=True)).task
    assert task is not None
    assert task.sandbox.image == "own"
    assert b64decode(task.agent.args["stdin"]).decode() == ROW["patch"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"instance_id": None}, "instance_id: is null"),
        ({"FAIL_TO_PASS": "t.py::a"}, "FAIL_TO_PASS: is text that is no JSON list"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS: is empty"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: holds what is no test id: [1]"),
        ({"problem_statement": " "}, "problem_statement: is empty"),
        ({"base_commit": 5}, "base_commit: is a number, not text"),
    ],
)
def test_what_is_wrong_with_a_row(change: dict[str, Any], says: str) -> None:
    assert says in "; ".join(swe_task(ROW | change, options()).problems)


def test_every_problem_of_every_row_is_told(tmp_path: Path) -> None:
    path = tmp_path / "swe.jsonl"
    bad = {"instance_id": "x"}
    path.write_text("\n".join(map(json.dumps, (ROW, bad, ROW | {"instance_id": "other", "PASS_TO_PASS": None}))))
    collected = import_swe(path, options())
    assert [task.id for task in collected.tasks] == ["yard__calc-7", "other"]
    assert len([problem for problem in collected.problems if problem.startswith(f"{path}:2: ")]) == 5
    assert "image: there is none" in "".join(swe_task(ROW, options(image="")).problems)
