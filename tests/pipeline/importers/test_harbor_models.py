"""What Harbor's own models read in our example tasks is what the importer reads."""

from __future__ import annotations

import os
from pathlib import Path

import harbor_models
import pytest

from rollyard.pipeline.importers.harbor import HarborOptions, harbor_task
from rollyard.pipeline.importers.harbor_folder import find_folders, read_folder

TASKS = Path(__file__).resolve().parents[3] / "docs" / "examples" / "tasks"
NETWORKS = {"no-network": "gateway", "public": "open", "allowlist": "allow"}
FULL = """
[agent]
timeout_sec = 7
user = "me"
[verifier]
env = {WHY = "so"}
[environment]
docker_image = "i"
cpus = 2
memory = "2G"
workdir = "/w"
allow_internet = false
env = {A = "1"}
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    if why := harbor_models.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def test_the_example_tasks_mean_the_same_to_both(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for name, text in {"task.toml": FULL, "instruction.md": "# canary\nDo.\n", "tests/test.sh": "x"}.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    folders = [*find_folders([TASKS]), own]
    for folder, theirs in zip(folders, harbor_models.read(folders), strict=True):
        assert "error" not in theirs, f"{folder.name}: {theirs}"
        made = harbor_task(read_folder(folder), HarborOptions())
        assert made.problems == ()
        task = made.task
        assert task is not None
        assert (task.id, task.prompt) == (theirs["name"], theirs["instruction"])
        assert (task.timeouts.run_s, task.evaluation.args["timeout_s"]) == (theirs["agent_s"], theirs["verifier_s"])
        spec = task.sandbox
        assert (spec.image, spec.network, spec.env) == (theirs["image"], NETWORKS[theirs["network"]], theirs["env"])
        assert (spec.workdir or None, spec.user or None) == (theirs["workdir"], theirs["user"])
        memory_mb = spec.limits.memory_bytes and spec.limits.memory_bytes >> 20
        assert (spec.limits.cpus, memory_mb) == (theirs["cpus"], theirs["memory_mb"])
        assert task.evaluation.args.get("env", {}) == theirs["verifier_env"]


def test_what_one_does_not_take_the_other_does_not(tmp_path: Path) -> None:
    broken = {
        "no_toml": {"instruction.md": "x"},
        "no_instruction": {"task.toml": "", "tests/test.sh": "x"},
        "no_test": {"task.toml": "", "instruction.md": "x"},
        "bad_type": {"task.toml": "[agent]\ntimeout_sec = 'long'\n", "instruction.md": "x", "tests/test.sh": "x"},
        "bad_mode": {
            "task.toml": "[environment]\nnetwork_mode = 'mesh'\n",
            "instruction.md": "x",
            "tests/test.sh": "x",
        },
    }
    for name, files in broken.items():
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    folders = [tmp_path / name for name in broken]
    for folder, theirs in zip(folders, harbor_models.read(folders), strict=True):
        assert "error" in theirs, folder.name
        assert harbor_task(read_folder(folder), HarborOptions(image="i")).problems, folder.name
