"""The house itself: layout, sizes, and that what documents and configuration files say is so."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rollyard.cli import parser
from rollyard.pipeline.config import load_config, reference
from rollyard.pipeline.embedded import find_binary
from rollyard.schemas import subjects
from rollyard.schemas.failure import FailureClass

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("schemas", "pipeline", "gateway", "harnesses", "stages")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
CODE = sorted(
    path
    for folder in (*FOLDERS, "src/rollyard/cli")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "compose/**/*.md") for path in ROOT.glob(pattern) if path.is_file()
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_package_links_to_the_folders_of_the_root(folder: str) -> None:
    link = ROOT / "src/rollyard" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder
    assert (link / "__init__.py").is_file()


def test_files_are_short() -> None:
    long = {str(path.relative_to(ROOT)): count for path in CODE if (count := _lines(path)) > MAX_FILE_LINES}
    assert long == {}


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def test_functions_are_short() -> None:
    long = {}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno
                if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}


def test_every_package_says_what_it_holds() -> None:
    silent = [str(path) for path in CODE if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_links_of_documents_lead_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert dead == []


def test_documents_name_commands_that_exist() -> None:
    said = parser().format_help()
    unknown = [
        f"{path.relative_to(ROOT)}: rollyard {name}"
        for path in DOCUMENTS
        for name in re.findall(r"(?:`|^ *)rollyard ([a-z][a-z-]+)", path.read_text(), re.MULTILINE)
        if not re.search(rf"^    {name}\b", said, re.MULTILINE)
    ]
    assert unknown == []


def test_the_architecture_names_every_stream_and_bucket() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    streams = ("TASKS", "STAGES", "LOG", "SAMPLES", "DEAD", "ALARMS")
    assert [name for name in streams if f"\n| {name} | `" not in text] == []
    assert set(re.findall(r"^\| `(\w+)` \| `<", text, re.MULTILINE)) == set(subjects.BUCKETS)


def test_the_roles_have_a_section_each() -> None:
    text = (ROOT / "docs/roles.md").read_text()
    roles = re.findall(r"^## ([a-z]+)$", text, re.MULTILINE)
    assert roles == ["admit", "init", "run", "eval", "aggregate", "sink", "gateway", "controller", "relay"]
    assert [name for name in get_args(FailureClass) if f"\n| `{name}` |" not in text] == []


def test_the_readme_is_short() -> None:
    assert _lines(ROOT / "README.md") <= 150


def test_the_reference_of_the_configuration_is_that_of_the_code() -> None:
    assert (ROOT / "docs/configuration.md").read_text().endswith("\n" + reference() + "\n"), (
        "write the output of `rollyard config reference` to the end of docs/configuration.md"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_says_why_and_what_it_costs(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {int(path.name[:4])}. ")
    assert [part for part in ("**Question.**", "**Decision.**", "**Why.**", "**Costs.**") if part not in text] == []


# --- compose/ ---


def _services() -> dict[str, dict[str, object]]:
    loaded = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
    services: dict[str, dict[str, object]] = loaded["services"]
    return services


def test_compose_has_a_service_for_each_role_with_a_health_check() -> None:
    services = _services()
    assert set(services) == {"nats", "gateway", "controller", "admit", "node", "aggregate", "sink"}
    assert [name for name, service in services.items() if "test" not in dict(service["healthcheck"])] == []  # type: ignore[call-overload]


def test_compose_runs_commands_that_exist() -> None:
    stages: list[str] = []
    for name, service in _services().items():
        if name == "nats":
            continue
        arguments = parser().parse_args(service["command"])  # type: ignore[arg-type]
        assert arguments.run
        stages += getattr(arguments, "stages", None) or []
        health = service["healthcheck"]["test"]  # type: ignore[index]
        if health[1] == "rollyard":
            assert parser().parse_args(health[2:]).run
    assert sorted(stages) == ["admit", "aggregate", "eval", "init", "run"]


def test_compose_keeps_the_stages_of_a_place_together() -> None:
    assert _services()["node"]["command"] == ["worker", "--stages", "init,run,eval"]


def test_compose_sets_keys_that_exist() -> None:
    for name, service in _services().items():
        environment = service.get("environment")
        if name != "nats":
            assert isinstance(environment, dict)
            config = load_config(Path(os.devnull), {key: str(value) for key, value in environment.items()})
            assert config.nats.url == "nats://nats:4222"
            assert config.secret({"ROLLYARD_SECRET": "x" * 32}) == b"x" * 32


def test_compose_mounts_only_volumes_that_it_declares_and_files_that_exist() -> None:
    loaded = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
    for service in loaded["services"].values():
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert source in loaded["volumes"] or (ROOT / "compose" / source).is_file()
        if "build" in service:
            assert (ROOT / "compose" / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_nats_server_accepts_its_configuration() -> None:
    command = [str(find_binary()), "-t", "-c", str(ROOT / "compose/nats.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_image_gets_the_whole_context_and_starts_rollyard() -> None:
    lines = (ROOT / "compose/Dockerfile").read_text().splitlines()
    assert "COPY . ." in lines
    assert 'ENTRYPOINT ["rollyard"]' in lines
    assert ".venv" in (ROOT / ".dockerignore").read_text().splitlines()


# --- Makefile and .ci/run ---


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=env, check=False)


def _python(folder: Path, script: str) -> str:
    path = folder / "python-stand-in"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    listed = re.findall(r"make ([\w-]+) ", _make("help").stdout)
    assert listed == phony
    assert {"demo", "test", "lint", "fmt", "bench", "agents", "clean"} <= set(listed)


def test_make_says_that_python_is_missing(tmp_path: Path) -> None:
    done = _make("install", f"VENV={tmp_path}/venv", "PYTHON=python-of-nowhere")
    assert done.returncode != 0
    assert "there is no python-of-nowhere. Install Python 3.11 or newer" in done.stderr


def test_make_says_that_python_is_too_old(tmp_path: Path) -> None:
    old = _python(tmp_path, 'case "$*" in *version_info*) exit 1;; esac\necho Python 3.9.2')
    done = _make("install", f"VENV={tmp_path}/venv", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.9.2 is too old. Rollyard needs Python 3.11 or newer" in done.stderr


def test_make_says_which_command_mends_a_debian_without_venv(tmp_path: Path) -> None:
    bare = _python(tmp_path, 'case "$*" in *ensurepip*) exit 1;; esac')
    done = _make("install", f"VENV={tmp_path}/venv", f"PYTHON={bare}")
    assert done.returncode != 0
    assert "sudo apt-get install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_lint_and_test() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert "make lint" in text
    assert "make test" in text
