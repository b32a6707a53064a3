"""`rollyard tasks import`: each command of docs/importing.md, and what it says when something is wrong."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.cli import main
from rollyard.pipeline.taskfile import read_task_file
from rollyard.stages.plugin_check import check_task

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "importing.md"
SWE = {
    "instance_id": "yard__calc-7",
    "repo": "yard/calc",
    "base_commit": "0123abc",
    "problem_statement": "add() is wrong",
    "patch": "",
    "test_patch": "diff --git a/t.py b/t.py\n",
    "FAIL_TO_PASS": '["t.py::a"]',
    "PASS_TO_PASS": [],
}
QUIZ = [{"question": "Red?", "choices": ["yes", "no"], "answer": 1}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the document's commands name."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?", "answer": "so\\n#### 2"}\n')
    pq.write_table(pa.Table.from_pylist(QUIZ), tmp_path / "quiz.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(SWE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("rollyard tasks")]


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_document(folder: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)[1:]
    assert main(words) == 0, capsys.readouterr().err
    written = folder / words[words.index("-o") + 1]
    tasks = read_task_file(written, check_task).tasks
    assert capsys.readouterr().out.startswith(f"{len(tasks)} task")
    assert main(["submit", "--check", str(written)]) == 0


def test_without_a_file_tasks_go_to_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "tasks import table gsm8k.jsonl --prompt question --answer answer --rule exact --answer-after ####"
    assert main(words.split()) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["evaluation"]["args"] == {"answer": "2"}


def test_a_check_writes_nothing_and_says_what_it_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tasks", "import", "harbor", "docs/examples/tasks", "--check", "-o", "x.jsonl", "--group-size", "4"]
    assert main([*words, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said == {"tasks": 10, "rollouts": 40, "file": "", "notes": []}
    assert not (folder / "x.jsonl").exists()


def test_what_is_ignored_is_said_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ignore = ["--ignore", "environment.docker_image", "--ignore", "environment.network_mode"]
    assert main(["tasks", "import", "harbor", "docs/examples/tasks", "--backend", "local", "--check", *ignore]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == "note: environment.docker_image is ignored: the backend 'local' has no images (10 tasks)"
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("table gsm8k.jsonl --prompt q --answer answer --rule math", "gsm8k.jsonl:1: q: there is no such column"),
        ("table gsm8k.jsonl --prompt question --answer answer --rule maht", "did you mean 'math'?"),
        ("table gsm8k.jsonl --prompt question --answer answer --rule math --arg digits=99", "evaluation.args.digits"),
        ("table gsm8k.jsonl --prompt question --answer answer --rule math --arg digits", "is no NAME=VALUE"),
        ("table gsm8k.jsonl --prompt question --answer answer --rule math --template x", "there is no {prompt} in it"),
        ("table gone.jsonl --prompt q --answer a --rule math", "cannot read gone.jsonl: No such file"),
        ("swe rows.jsonl", "rows.jsonl:1: image: there is none"),
        ("harbor docs", "docs: task.toml: there is none"),
        ("harbor docs/examples/tasks --backend dokcer", "did you mean 'docker'?"),
        ("harbor docs/examples/tasks --backend local", "environment.docker_image: the backend 'local' has no images"),
    ],
)
def test_one_message_says_what_is_wrong(
    folder: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "import", *words.split(), "-o", "out.jsonl"]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "out.jsonl").exists()


def test_a_place_that_cannot_be_written_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "import", "harbor", "docs/examples/tasks", "-o", "no/where.jsonl"]) == 3
    assert "cannot write no/where.jsonl" in capsys.readouterr().err
