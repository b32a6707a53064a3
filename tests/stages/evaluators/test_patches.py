"""Patches: what git makes of real changes, and what is left without some files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollyard.stages.evaluators.patches import files_of, matches, split, without

NAMES = ("plain.py", "with space.txt", "ümläut.txt", 'quo"te.txt', "gone.txt", "moved.txt", "mode.sh")


def git(folder: Path, *arguments: str, data: bytes = b"") -> bytes:
    settings = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=main")
    return subprocess.run(
        ["git", *settings, *arguments], cwd=folder, input=data, capture_output=True, check=True
    ).stdout


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A repository with changes of every kind that are not committed."""
    git(tmp_path, "init", "-q")
    for name in NAMES:
        (tmp_path / name).write_text(f"one\ntwo of {name}\nthree\n" * 5)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "base")
    for name in NAMES[:4]:
        (tmp_path / name).write_text("other\n" + (tmp_path / name).read_text())
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "moved.txt").rename(tmp_path / "there.txt")
    (tmp_path / "mode.sh").chmod(0o755)
    (tmp_path / "empty").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "binary").write_bytes(bytes(range(256)) * 20)
    git(tmp_path, "add", "-A")
    return tmp_path


@pytest.mark.parametrize("renames", ["--no-renames", "--find-renames"])
def test_the_files_of_a_patch(changed: Path, renames: str) -> None:
    patch = git(changed, "diff", "--cached", "--binary", renames)
    touched = {*NAMES, "there.txt", "empty", "sub/binary"}
    assert set().union(*(part.paths for part in split(patch))) == touched
    assert b"".join(part.text for part in split(patch)) == patch


@pytest.mark.parametrize("renames", ["--no-renames", "--find-renames"])
def test_a_patch_without_a_file_applies_and_leaves_that_file(changed: Path, renames: str) -> None:
    patch = git(changed, "diff", "--cached", "--binary", renames)
    for left_out in (*NAMES, "sub/binary"):
        kept, count = without(patch, lambda path, name=left_out: path == name)
        assert count == 1
        git(changed, "reset", "-q", "--hard")
        git(changed, "clean", "-qfd")
        git(changed, "apply", "--index", data=kept)
        assert left_out.encode() not in git(changed, "-c", "core.quotePath=false", "diff", "--cached", "--name-only")


def test_nothing_is_no_patch() -> None:
    assert (split(b""), split(b"hello\n"), files_of("")) == ([], [], set())
    assert files_of("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n") == {"x.py"}
    assert files_of("--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+b\n") == {"new.py"}


def test_content_that_looks_like_a_header_is_none() -> None:
    patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- a/conftest.py\n+++ b/conftest.py\n"
    assert files_of(patch) == {"x"}


@pytest.mark.parametrize(
    ("path", "pattern", "found"),
    [
        ("conftest.py", "conftest.py", True),
        ("a/b/conftest.py", "conftest.py", True),
        ("a/conftest.pyc", "conftest.py", False),
        ("a/x.pth", "*.pth", True),
        ("tests/a.py", "tests/*", True),
        ("src/tests/a.py", "tests/*", False),
    ],
)
def test_patterns_match_a_path_or_its_last_part(path: str, pattern: str, found: bool) -> None:
    assert matches(path, (pattern,)) is found
