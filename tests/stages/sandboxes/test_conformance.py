"""The conformance kit on every backend, and on backends that are broken on purpose: the kit must see it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import record_conformance
from kit_settings import BACKENDS, NOT_HERE, Missing, setting_of

from rollyard.cli import main
from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.stages.conformance.behaviour import Verdict
from rollyard.stages.conformance.bench import Setting
from rollyard.stages.conformance.catalogue import BEHAVIOURS, GROUPS, chosen
from rollyard.stages.conformance.check import check
from rollyard.stages.conformance.counterparts import counterparts
from rollyard.stages.sandbox import ExecResult, Labels, ProcessEnd
from rollyard.stages.sandboxes.local import LocalBackend, LocalSandbox
from rollyard.stages.shell import ShellResult

AT_A_TIME = 6


# --- the backends that ship ---


@pytest.mark.parametrize("group", [group.name for group in GROUPS])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_backend_does_what_every_backend_must(backend: str, group: str, tmp_path: Path) -> None:
    behaviours = [known for known in chosen([group]) if known.id not in NOT_HERE.get(backend, ())]
    try:
        async with setting_of(backend, tmp_path) as setting:
            verdicts = await check(setting, behaviours, at_a_time=AT_A_TIME)
    except Missing as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
    assert {verdict.behaviour.id: verdict.reason for verdict in verdicts if verdict.outcome == "fail"} == {}
    assert any(verdict.outcome == "pass" for verdict in verdicts) or group in ("limits", "network")


# --- backends that are broken on purpose ---


class _Broken(LocalBackend):
    """A local backend whose sandboxes are of `kind`."""

    kind: type[LocalSandbox] = LocalSandbox

    async def create(self, labels: Labels, *plan: Any) -> LocalSandbox:
        return self._made(await super().create(labels, *plan))

    async def open(self, ref: Any) -> LocalSandbox:
        return self._made(await super().open(ref))

    def _made(self, sandbox: LocalSandbox) -> LocalSandbox:
        made = self.kind.__new__(self.kind)
        made.__dict__.update(sandbox.__dict__)
        return made


def broken(kind: type[LocalSandbox]) -> type[LocalBackend]:
    return type(f"Broken{kind.__name__}", (_Broken,), {"kind": kind})


class Truncates(LocalSandbox):
    async def put_files(self, files: Mapping[str, str | bytes], **more: Any) -> None:
        await super().put_files({path: content[:1_000_000] for path, content in files.items()}, **more)


class Follows(LocalSandbox):
    async def put_files(self, files: Mapping[str, str | bytes], **more: Any) -> None:
        for path, content in files.items():
            target = Path(self.workdir, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        try:
            return Path(self.workdir, path).read_bytes()[:max_bytes]
        except OSError:
            return None


class ForgetsModes(LocalSandbox):
    async def put_tree(self, archive: bytes | Path, target: str) -> None:
        await super().put_tree(archive, target)
        for path in Path(self.workdir, target).rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o644)


class IgnoresCwd(LocalSandbox):
    async def exec(self, *given: Any, cwd: str | None = None, **more: Any) -> ExecResult:
        return await super().exec(*given, **more)


class MixesStreams(LocalSandbox):
    async def exec(self, *given: Any, **more: Any) -> ExecResult:
        result = await super().exec(*given, **more)
        return ExecResult(
            result.exit_code, result.stdout + result.stderr, b"", timed_out=result.timed_out, truncated=result.truncated
        )


class DropsInput(LocalSandbox):
    async def exec(self, *given: Any, stdin: bytes = b"", **more: Any) -> ExecResult:
        return await super().exec(*given, **more)


class LeaksEnvironment(LocalSandbox):
    async def exec(self, *given: Any, env: Mapping[str, str] | None = None, **more: Any) -> ExecResult:
        leaked = {name: value for name, value in os.environ.items() if name.startswith("ROLLYARD_CHECK")}
        return await super().exec(*given, env={**leaked, **(env or {})}, **more)


class LeaksChildren(LocalSandbox):
    """Runs by `subprocess`, and kills what it started and no more."""

    async def exec(self, script_or_argv: Any, *, timeout_s: float, **more: Any) -> ExecResult:
        argv = ("sh", "-c", script_or_argv) if isinstance(script_or_argv, str) else script_or_argv
        cwd = Path(self.workdir, more.get("cwd") or "")
        out = Path(self.workdir).parent / "tmp" / "leaked"
        with out.open("wb") as stdout:
            child = await asyncio.create_subprocess_exec(*argv, cwd=cwd, stdout=stdout)
            try:
                async with asyncio.timeout(timeout_s):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
                return ExecResult(None, b"", b"", timed_out=True, truncated=False)
        return ExecResult(child.returncode, out.read_bytes(), b"", timed_out=False, truncated=False)


class StartsAgain(LocalSandbox):
    async def start(self, name: str, command: Any, *, deadline_s: float) -> bool:
        if not await super().start(name, command, deadline_s=deadline_s):
            await super().start(f"{name}-{os.urandom(4).hex()}", command, deadline_s=deadline_s)
        return True


class NoDeadline(LocalSandbox):
    async def start(self, name: str, command: Any, *, deadline_s: float) -> bool:
        return await super().start(name, command, deadline_s=deadline_s + 3)

    async def wait(self, name: str) -> ProcessEnd:
        end = await super().wait(name)
        return ProcessEnd(end.exit_code, "exited")


class ForgetsTheShell(LocalSandbox):
    async def shell(self, **given: Any) -> Any:
        outer = self

        class EachAnew:
            async def __aenter__(self) -> EachAnew:
                return self

            async def __aexit__(self, *_: object) -> None: ...

            async def run(self, command: str, *, timeout_s: float, max_output_bytes: int = 1 << 20) -> ShellResult:
                async with await LocalSandbox.shell(outer, **given) as shell:
                    return await shell.run(command, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

        return EachAnew()


class LivesOn(LocalSandbox):
    async def destroy(self) -> None:
        """Says that it is done."""


CASES: list[tuple[type[LocalSandbox], str]] = [
    (Truncates, "files.huge"),
    (Follows, "files.escape files.planted_link files.replaces"),
    (ForgetsModes, "files.tree"),
    (IgnoresCwd, "exec.directory"),
    (MixesStreams, "exec.streams"),
    (DropsInput, "exec.stdin"),
    (LeaksEnvironment, "exec.environment"),
    (LeaksChildren, "exec.leftovers exec.timeout_tree"),
    (StartsAgain, "processes.started_once processes.race"),
    (NoDeadline, "processes.deadline"),
    (ForgetsTheShell, "shell.keeps"),
    (LivesOn, "lifecycle.gone labels.listed"),
]


globals().update({f"Broken{kind.__name__}": broken(kind) for kind, _ in CASES})


@pytest.mark.parametrize(("kind", "seen_by"), CASES, ids=lambda value: getattr(value, "__name__", ""))
async def test_the_kit_sees_what_is_broken(kind: type[LocalSandbox], seen_by: str) -> None:
    async with counterparts(f"{__name__}:Broken{kind.__name__}", "", {}) as setting:
        try:
            verdicts = await check(setting, chosen(seen_by.split()), at_a_time=AT_A_TIME)
        finally:
            end_all(setting.settings["root"])
    assert [verdict.behaviour.id for verdict in verdicts if verdict.outcome != "fail"] == []


def end_all(root: str) -> None:
    """Kill what a broken backend left at work in its sandboxes."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str((folder / "cwd").readlink()).startswith(root):
                os.kill(int(folder.name), signal.SIGKILL)


# --- the kit and its command ---


def test_the_catalogue_is_whole() -> None:
    ids = [behaviour.id for behaviour in BEHAVIOURS]
    assert len(set(ids)) == len(ids) >= 40
    assert [behaviour.id for behaviour in BEHAVIOURS if not behaviour.shows] == []
    assert {known.id for known in chosen(["labels", "exec.streams"])} >= {"exec.streams", "labels.listed"}
    with pytest.raises(ConfigError, match=r"no behaviour .exec\.nothing"):
        chosen(["exec.nothing"])


async def test_a_backend_that_makes_no_sandbox_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    setting = Setting("local", {"root": str(tmp_path / "file" / "sandboxes")})
    with pytest.raises(SandboxError, match="cannot be used"):
        await check(setting, BEHAVIOURS)


async def test_without_files_and_processes_nothing_is_offered() -> None:
    verdicts: list[Verdict] = []
    async with counterparts("none", "", {}) as setting:
        await check(setting, BEHAVIOURS, verdicts.append)
    assert {verdict.outcome for verdict in verdicts} == {"not offered"}
    assert len(verdicts) == len(BEHAVIOURS)


def test_the_command_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", "local", "--only", "labels", "--only", "lifecycle.diff"]) == 0
    told = capsys.readouterr()
    assert re.search(r"^pass +labels\.listed +\d", told.out, re.MULTILINE)
    assert re.search(r"^not offered +lifecycle\.diff .* it cannot compare$", told.out, re.MULTILINE)
    assert "3 passed, 0 failed, 1 not offered" in told.err
    assert main(["sandbox", "check", "local", "--only", "labels.lease", "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert [(line["behaviour"], line["outcome"]) for line in parsed] == [("labels.lease", "pass")]


def test_the_command_fails_with_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", f"{__name__}:BrokenMixesStreams", "--only", "exec.streams"]) == 1
    assert re.search(r"^fail +exec\.streams .* result: ", capsys.readouterr().out, re.MULTILINE)
    assert main(["sandbox", "check", "no-such-backend"]) == 2
    assert "no sandbox backend is called 'no-such-backend'" in capsys.readouterr().err


def test_the_list_says_what_each_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "ls"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"apptainer", "bubblewrap", "docker", "e2b", "local", "none"} <= lines.keys()
    assert LocalBackend.capabilities.tested in lines["local"]
    assert main(["sandbox", "ls", "--json"]) == 0
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} >= {"local", "docker"}


def test_the_page_has_the_recorded_tables() -> None:
    record = json.loads(record_conformance.RECORD.read_text())
    page = record_conformance.PAGE.read_text()
    assert record_conformance.with_tables(page, record) == page, (
        "write them with tests/stages/sandboxes/record_conformance.py"
    )
    known = {behaviour.id for behaviour in BEHAVIOURS}
    assert list(record) == list(BACKENDS)
    assert [backend for backend, entry in record.items() if entry["outcomes"].keys() != known] == []
