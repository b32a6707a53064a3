"""Bundles: made once and whole, found, outdated, and running without a library of the machine's."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.harnesses.bundles import bundle
from rollyard.harnesses.bundles.build import build
from rollyard.harnesses.bundles.bundle import FOLDER_ENV, PYTHON, Say, find_bundle, folder_of, known_bundles, state_of
from rollyard.schemas.errors import HarnessError


@dataclass
class Tiny:
    """A recipe for one script."""

    text: str = "echo 1.0"
    name: str = "tiny"
    version: str = "1.0"
    program: str = "tiny"
    trial: tuple[str, ...] = ()
    filled: int = 0

    def digest(self) -> str:
        return self.text

    def fill(self, folder: Path, say: Say) -> None:
        self.filled += 1
        say("writing")
        (folder / "bin").mkdir(mode=0o700)
        script = folder / "bin" / "tiny"
        script.write_text(f"#!/bin/sh\n{self.text}\n")
        script.chmod(0o700)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "bundles"))
    return tmp_path / "bundles"


def test_a_bundle_is_made_once_by_whoever_comes_first(folder: Path) -> None:
    tiny, said = Tiny(), list[str]()
    assert state_of(tiny) == "missing"
    builders = [threading.Thread(target=build, args=(tiny, said.append)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert (tiny.filled, said, state_of(tiny)) == (1, ["writing", "trying it"], "ready")
    program = folder / "tiny-1.0" / "bin" / "tiny"
    assert subprocess.check_output([program]) == b"1.0\n"
    assert (program.stat().st_mode & 0o777, program.parent.stat().st_mode & 0o777) == (0o755, 0o755)
    assert [path.name for path in folder.iterdir() if not path.name.endswith(".lock")] == ["tiny-1.0"]


def test_a_changed_recipe_makes_it_anew_and_one_that_fails_leaves_the_old_one(folder: Path) -> None:
    build(Tiny(), lambda _: None)
    assert state_of(Tiny("echo 2")) == "outdated"
    with pytest.raises(HarnessError, match="exit status 3: no"):
        build(Tiny("echo no >&2; exit 3"), lambda _: None)
    assert state_of(Tiny()) == "ready"
    build(Tiny("echo 2"), lambda _: None)
    assert subprocess.check_output([folder_of(Tiny()) / "bin" / "tiny"]) == b"2\n"


def test_a_folder_without_its_record_counts_for_nothing(folder: Path) -> None:
    build(Tiny(), lambda _: None)
    (folder / "tiny-1.0" / "bundle.json").write_text("{")
    assert state_of(Tiny()) == "missing"
    build(Tiny(), lambda _: None)
    assert state_of(Tiny()) == "ready"


def test_a_missing_bundle_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HarnessError, match=r"codex 0\.171\.0 is missing.*rollyard agent bundle codex"):
        find_bundle("codex")
    with pytest.raises(HarnessError, match="did you mean 'codex'"):
        find_bundle("codx")
    monkeypatch.setattr(bundle, "entry_points", lambda group: type("Names", (), {"names": {"mine"}}))
    assert "mine" in known_bundles()


def test_python_is_a_bundle_that_needs_nothing_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "bundle", PYTHON, "nothing"]) == 1
    told = capsys.readouterr()
    assert " MB in " in told.out and "no agent bundle is called 'nothing'" in told.err
    python = find_bundle(PYTHON) / "bin" / "python3"
    code = (
        "import ctypes, json, sqlite3, ssl, subprocess, sys; from pathlib import Path; "
        "own = [line.split()[-1] for line in Path('/proc/self/maps').read_text().splitlines() if '.so' in line]; "
        "child = subprocess.check_output([sys.executable, '-c', 'import sys; print(sys.prefix)'], text=True); "
        "print(json.dumps([sys.prefix, child.strip(), sorted(set(own))]))"
    )
    said = subprocess.check_output([python, "-c", code], env={"PATH": "/nowhere", "LD_LIBRARY_PATH": "/nowhere"})
    prefix, child, libraries = json.loads(said)
    assert prefix == child == str(find_bundle(PYTHON))
    assert [path for path in libraries if not path.startswith(prefix)] == []
    assert main(["agent", "ls"]) == 0
    assert "ready" in capsys.readouterr().out
