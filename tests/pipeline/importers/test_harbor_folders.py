"""Task folders in Harbor's format: what becomes of each field, and what is refused by its name."""

from __future__ import annotations

import io
import tarfile
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline.importers.harbor import HarborOptions, harbor_task, import_harbor
from rollyard.pipeline.importers.harbor_folder import read_folder, without_canary
from rollyard.pipeline.importers.imported import Converted
from rollyard.schemas.sandbox import Limits, SetupStep
from rollyard.schemas.task import AgentSpec, Task, Timeouts
from rollyard.stages.evaluator import open_rule
from rollyard.stages.evaluators.harbor import Harbor

FULL = """
schema_version = "1.4"
artifacts = ["out", "/var/report", {source = "/data", exclude = ["*.tmp"]}]
[task]
name = "org/name"
version = "2"
keywords = ["a"]
[metadata]
difficulty = "hard"
made = 2026-01-02
[agent]
timeout_sec = 120.5
user = 1000
[verifier]
timeout_sec = 30
env = {WHY = "so"}
user = 1000
environment_mode = "separate"
[environment]
docker_image = "yard:1"
cpus = 1.5
memory_mb = 512
storage_mb = 1024
workdir = "/app"
network_mode = "allowlist"
allowed_hosts = ["example.org", "10.0.0.0/8"]
env = {A = "1"}
healthcheck = {command = "test -e up", timeout_sec = 5, retries = 4, start_period_sec = 2}
[solution]
env = {HOW = "well"}
"""
DOCKER = HarborOptions()


def folder(root: Path, config: str = '[environment]\ndocker_image = "i"\n', **files: str | bytes) -> Path:
    """A task folder; names of files with `__` for a slash."""
    path = root / "task"
    given: dict[str, str | bytes] = {
        "task.toml": config,
        "instruction.md": "Do it.\n",
        "tests__test.sh": "#!/bin/sh\n",
        "solution__solve.sh": "#!/bin/sh\n",
    }
    for name, content in (given | files).items():
        target = path / name.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def converted(root: Path, config: str | None = None, *, given: HarborOptions = DOCKER, **files: Any) -> Converted:
    return harbor_task(read_folder(folder(root, *([] if config is None else [config]), **files)), given)


def imported(root: Path, config: str | None = None, **more: Any) -> Task:
    made = converted(root, config, **more)
    assert made.problems == ()
    assert made.task is not None
    return made.task


def test_every_field_has_its_place(tmp_path: Path) -> None:
    task = imported(tmp_path, FULL, environment__notes="n\n")
    assert (task.id, task.prompt, task.data_source) == ("org/name", "Do it.\n", "org")
    assert task.metadata == {"difficulty": "hard", "made": "2026-01-02", "version": "2", "keywords": ("a",)}
    assert task.timeouts == Timeouts(init_s=300 + 2 + 4 * 10, run_s=120.5, eval_s=90)
    spec = task.sandbox
    assert (spec.backend, spec.image, spec.build, spec.workdir, spec.user) == ("docker", "yard:1", None, "/app", "1000")
    assert (spec.network, spec.allow_hosts, spec.env) == ("allow", ("example.org", "10.0.0.0/8"), {"A": "1"})
    assert spec.limits == Limits(cpus=1.5, memory_bytes=512 << 20, disk_bytes=1024 << 20)
    assert spec.files == {"notes": "n\n"}
    assert spec.setup == (SetupStep(run="sleep 2; test -e up", timeout_s=5.0, max_tries=4),)
    assert (task.evaluation.rule, task.evaluation.sandbox) == ("harbor", "fresh")
    rule = open_rule("harbor", task.evaluation.args)
    assert isinstance(rule, Harbor)
    assert (rule.timeout_s, rule.env, rule.copy) == (30, {"WHY": "so"}, ("/logs/artifacts", "/var/report", "/data"))
    assert task.agent == AgentSpec(harness="bash")


def test_the_least_that_a_task_has(tmp_path: Path) -> None:
    task = imported(tmp_path)
    assert (task.id, task.sandbox.network, task.evaluation.sandbox) == ("task", "open", "auto")
    assert task.timeouts == Timeouts(init_s=300, run_s=900, eval_s=660)


def test_files_that_are_no_text_or_can_be_executed_come_so(tmp_path: Path) -> None:
    path = folder(tmp_path, environment__data__b=b"\0\xff", environment__run=b"#!/bin/sh\n", tests__b=b"\xff")
    (path / "environment" / "run").chmod(0o755)
    task = harbor_task(read_folder(path), DOCKER).task
    assert task is not None
    assert task.sandbox.files == {"data/b.base64": "AP8=", "run": "#!/bin/sh\n"}
    (step,) = task.sandbox.steps()
    assert step.run == "set -e\nbase64 -d <data/b.base64 >data/b && rm -f -- data/b.base64\nchmod +x -- run"
    assert task.evaluation.args["binary_tests"] == {"b": "/w=="}


def test_a_dockerfile_is_built_where_that_can_be(tmp_path: Path) -> None:
    config = "[environment]\nbuild_timeout_sec = 9\n"
    task = imported(tmp_path, config, environment__Dockerfile="FROM x\nCOPY a b\n", environment__a="1")
    build = task.sandbox.build
    assert build is not None
    assert (build.dockerfile, build.files, build.context, build.timeout_s) == ("FROM x\nCOPY a b\n", {"a": "1"}, "", 9)
    assert task.sandbox.files == {}, "what the image has is not put there again"
    binary = imported(tmp_path, config, environment__Dockerfile="FROM x\n", environment__b=b"\xff")
    assert binary.sandbox.build is not None
    assert binary.sandbox.build.context == str(tmp_path / "task" / "environment")
    named = imported(tmp_path, config, given=HarborOptions(image="mine"), environment__Dockerfile="FROM x\n")
    assert (named.sandbox.image, named.sandbox.build, named.sandbox.files) == ("mine", None, {})


@pytest.mark.parametrize(
    ("config", "files", "given", "says"),
    [
        ("[environment]\ngpus = 1\n", {}, {}, "environment.gpus: no backend gives GPUs"),
        ('[[environment.mcp_servers]]\nname = "x"\n', {}, {}, "environment.mcp_servers: "),
        ('[environment]\nskills_dir = "/s"\n', {}, {}, "environment.skills_dir: "),
        ('[environment]\nos = "windows"\n', {}, {}, "environment.os: sandboxes are Linux"),
        ('[[steps]]\nname = "one"\n', {}, {}, "steps: a task has one prompt"),
        ('[verifier.environment]\ncpus = 1\n', {}, {}, "verifier.environment: "),
        ('[[verifier.collect]]\ncommand = "x"\n', {}, {}, "verifier.collect: "),
        ("", {"environment__docker-compose.yaml": "x"}, {}, "environment/docker-compose.yaml: a sandbox is one"),
        ('artifacts = [{source = "/a", service = "db"}]\n', {}, {}, "artifacts[0].service: "),
        ('[environment.env]\nKEY = "${KEY}"\n', {}, {}, "environment.env.KEY: takes its value from the machine"),
        ('[verifier]\nuser = "judge"\n', {}, {}, "verifier.user: "),
        ('[verifier]\nnetwork_mode = "no-network"\n', {}, {}, "verifier.network_mode: "),
        ("[environment]\ncpus = 1\n", {}, {"limits": ()}, "environment.cpus: the backend 'docker' cannot keep"),
        ('[environment]\nmemory = "lots"\n', {}, {}, "environment.memory: 'lots' is no size"),
        ('[agent]\nuser = "x"\n', {}, {"users": False}, "agent.user: "),
        ('[environment]\nworkdir = "/x"\n', {}, {"workdirs": False}, "environment.workdir: "),
        ('[environment]\nnetwork_mode = "allowlist"\n', {}, {"networks": ("open",)}, "environment.network_mode: "),
        ("", {"environment__Dockerfile": "FROM x"}, {"builds": False}, "environment/Dockerfile: the backend 'docker'"),
        ("", {}, {"image": ""}, "environment.docker_image: there is none"),
    ],
)  # fmt: skip
def test_what_has_no_place_is_refused_by_name_and_can_be_ignored(
    tmp_path: Path, config: str, files: dict[str, str], given: dict[str, Any], says: str
) -> None:
    given = {"image": "mine", **given} if "environment__Dockerfile" not in files else given
    refused = converted(tmp_path, config, given=HarborOptions(**given), **files)
    (problem,) = refused.problems
    assert problem.startswith(says)
    name = problem.rpartition("--ignore ")[2]
    ignored = converted(tmp_path, config, given=HarborOptions(ignore=frozenset({name}), **given), **files)
    assert (ignored.problems, ignored.task is not None) == ([], True) or ignored.problems == ()
    assert ignored.notes[0].startswith(f"{name} is ignored: ")


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        ("[environment", {}, "task.toml: cannot be read"),
        ("[agent]\ntimeout_sec = 'long'\n", {}, "agent.timeout_sec: Expected `float | null`, got `str`"),
        ("[environment]\nnetwork_mode = 'mesh'\n", {}, "environment.network_mode: Invalid enum value 'mesh'"),
        (None, {"instruction.md": " \n"}, "instruction.md: is empty"),
        (None, {"instruction.md": b"\xff"}, "instruction.md: cannot be read"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, config: str | None, files: dict[str, Any], says: str) -> None:
    assert any(problem.startswith(says) for problem in converted(tmp_path, config, **files).problems)


def test_a_folder_without_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    collected = import_harbor([tmp_path / "empty", tmp_path / "gone"], DOCKER)
    assert [problem.partition(": ")[2].partition(":")[0] for problem in collected.problems] == [
        "task.toml", "instruction.md", "task.toml", "instruction.md",
    ]  # fmt: skip
    path = folder(tmp_path)
    (path / "tests" / "test.sh").unlink()
    assert harbor_task(read_folder(path), DOCKER).problems == ["tests/test.sh: there is none"]


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tests" / "secret").symlink_to("/etc/passwd")
    (problem,) = harbor_task(read_folder(path), DOCKER).problems
    assert "secret is a link that leads out of the task's folder" in problem


def test_the_oracle_brings_the_solution_and_nobody_else_sees_it(tmp_path: Path) -> None:
    task = imported(tmp_path, FULL, given=HarborOptions(stand_in="oracle"), solution__data="d")
    with tarfile.open(fileobj=io.BytesIO(b64decode(task.agent.args["stdin"]))) as archive:
        assert sorted(archive.getnames()) == ["data", "solve.sh"]
        assert archive.getmember("solve.sh").mode == 0o755
    assert task.agent.args["env"] == {"HOW": "well"}
    nobody = imported(tmp_path, FULL, given=HarborOptions(stand_in="nothing"))
    assert nobody.agent == AgentSpec(harness="command", args={"command": ["true"]})
    assert "solve" not in str(imported(tmp_path, FULL))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<!-- canary 1 -->\n# Canary 2\n\n# Title\n", "# Title\n"),
        ("# Title\n# canary\n", "# Title\n# canary\n"),
        ("<!-- note -->\nx", "<!-- note -->\nx"),
        ("", ""),
    ],
)
def test_only_leading_canary_lines_go(text: str, left: str) -> None:
    assert without_canary(text) == left
