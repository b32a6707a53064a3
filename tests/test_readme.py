"""The commands of README.md do what it says, against a real installation with a scripted policy."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollyard.cli import parser

pytestmark = pytest.mark.model  # the scripted policy uses its tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SCRIPT = """\
{"conversations": [
  {"match": "b.txt", "turns": [{"content": "-"}, {"content": "-"}, {"content": "-"}, {"content": "-"},
                               {"content": "touch hello.txt"}, {"content": "done"}]},
  {"turns": [{"content": "It is 5 or 4."}]}
]}
"""


def block(language: str, containing: str) -> str:
    """The one code block in a language that contains a text."""
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in code]
    return str(found)


@pytest.fixture(scope="module")
def beside_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which `rollyard up` runs with the default data folder, as the README has it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "script.json").write_text(SCRIPT)
    command = [sys.executable, "-m", "rollyard", "up", "--scripted", "script.json"]
    with (folder / "up.out").open("w") as output:
        up = subprocess.Popen(
            [*command, "--nats-port", "0", "--gateway-port", "0"], cwd=folder, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 120
        while "is up" not in (said := (folder / "up.out").read_text()):
            assert up.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        yield folder
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(90)


def run(command: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_trainer(beside_up: Path) -> None:
    said = run([sys.executable, "-c", block("python", "connect_sync")], beside_up).splitlines()
    assert len(said) == 8
    assert [line.split()[:2] for line in said] == [[str(index), "1.0"] for index in range(8)]


def test_the_evaluation(beside_up: Path) -> None:
    commands = block("sh", "submit tasks.jsonl")
    said = run(["bash", "-euo", "pipefail", "-c", commands], beside_up)
    assert "2 tasks published to run eval-1." in said
    assert "8/8 rollouts, 2/2 groups" in said
    assert re.search(r"^hello +1 +4$", said, re.MULTILINE)
    assert re.search(r"^sum +1 +4$", said, re.MULTILINE)
    assert "tokens are trained" in said
    assert re.search(r"^(\d+) of \1 samples of 8 rollouts equal their commits\.$", said, re.MULTILINE)


def test_the_platform(beside_up: Path) -> None:
    lines = [shlex.split(line, comments=True) for line in block("sh", "rollyard controller").splitlines()]
    assert len(lines) == 9
    for words in lines:
        assert words[0] == "rollyard"
        assert parser().parse_args(words[1:]).run
    said = run(["rollyard", "doctor"], beside_up)
    assert re.search(r"^ok +bus ", said, re.MULTILINE)


def test_the_make_targets_of_the_first_lines_exist() -> None:
    targets = re.findall(r"^    make (\w+) ", README, re.MULTILINE)
    assert targets == ["demo", "test"]
