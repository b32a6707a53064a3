"""The shim in several shells: whatever a task says reaches the agent as it is."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollyard.harnesses.harness import Command
from rollyard.stages.sandbox import Labels, ProcessEnd
from rollyard.stages.sandboxes.local import LocalBackend, LocalSandbox, LocalSettings
from rollyard.stages.sandboxes.shimmed import SHELL_VARIABLES, Host

SHELLS = [path for path in map(shutil.which, ("dash", "bash")) if path]
TELL = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ), os.getsid(0) == os.getpid()]))"

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: (
        name not in SHELL_VARIABLES
        and not name.startswith(("shim_", "LD_", "PYTHON", "MALLOC", "BASH", "LC_", "LANG", "GLIBC"))
    )
)


async def told(root: Path, shell: str, setsid: str, argv: list[str], env: dict[str, str]) -> list[object]:
    async with LocalBackend(LocalSettings(root=str(root))) as backend:
        backend.host = Host(dataclasses.replace(backend.shims, shell=shell, setsid=setsid))
        sandbox: LocalSandbox = await backend.create(
            Labels(run="r", rollout_id="r1", attempt=1, owner="", created_ms=0)
        )
        command = Command((sys.executable, "-I", "-S", "-X", "utf8", "-c", TELL, *argv), env)
        await sandbox.start("agent", command, deadline_s=60)
        end = await sandbox.wait("agent")
        stdout, stderr = await sandbox.output("agent", 100_000)
        assert end == ProcessEnd(0, "exited"), stderr
        await sandbox.destroy()
        parsed: list[object] = json.loads(stdout)
        return parsed


@pytest.mark.parametrize("shell", SHELLS)
@given(argv=st.lists(texts, max_size=4), env=st.dictionaries(names, texts, max_size=4))
@example(argv=["", "-n", "\\n", "$HOME `id` $(id)", "'\"", "*", "\x01\x7f\x80\x81\x88", "a\n"], env={"x": "\\c*\n$x"})
@example(argv=["é\u0081\u0088漢"], env={"control": "1", "status": "2", "line": "3", "PATH": "/nowhere", "left_ms": "4"})
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arguments_and_environment_arrive_unchanged(
    tmp_path: Path, shell: str, argv: list[str], env: dict[str, str]
) -> None:
    got_argv, got_env, leads_session = asyncio.run(told(tmp_path / "s", shell, shutil.which("setsid") or "", argv, env))
    assert got_argv == argv
    assert isinstance(got_env, dict)
    assert {name: got_env.get(name) for name in env} == env
    assert leads_session


@pytest.mark.parametrize("shell", SHELLS)
def test_python_does_the_work_of_setsid(tmp_path: Path, shell: str) -> None:
    argv, _, leads_session = asyncio.run(told(tmp_path / "s", shell, "", ["a b", "-c"], {"PATH": "/nowhere"}))
    assert argv == ["a b", "-c"]
    assert leads_session
