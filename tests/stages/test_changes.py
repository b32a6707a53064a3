"""The diff of an agent's work: everything that it changed, whatever it did to git, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollyard.schemas.errors import SandboxError
from rollyard.stages.changes import mark_baseline, working_diff
from rollyard.stages.hooks.git_diff import counts
from rollyard.stages.sandbox import Labels
from rollyard.stages.stage import now_ms

IDENTITY = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
async def sandbox(crew: Any) -> Any:
    labels = Labels(run="r", rollout_id="r1", attempt=1, owner="w1", created_ms=now_ms())
    return await crew.context.backends["local"].create(labels)


async def do(sandbox: Any, script: str) -> None:
    ended = await sandbox.exec("set -e\n" + script, env=IDENTITY, timeout_s=30)
    assert ended.exit_code == 0, ended.stderr


def apply(diff: bytes, to: Path) -> None:
    """Apply the diff with plain git to a folder that is as before."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=to,
        input=diff,
        capture_output=True,
        check=False,
        env={"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(to.parent)},
    )
    assert done.returncode == 0, done.stderr


BEFORE = r"""
mkdir -p sub
printf 'one\ntwo\n' > a.txt
printf 'keep' > sub/keep
printf '\000\001' > data.bin
printf '#!/bin/sh\n' > run.sh
"""
AFTER = r"""
printf 'one\nTWO\n' > a.txt
rm sub/keep
printf '\000\002\003' > data.bin
chmod +x run.sh
ln -s /etc/passwd link
printf 'spaces and \303\244' > 'a new file'
"""


def content(top: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(top)): str(path.readlink())
        if path.is_symlink()
        else (path.read_bytes(), path.stat().st_mode)
        for path in top.rglob("*")
        if not path.is_dir() and ".git" not in path.parts
    }


@pytest.mark.parametrize("repository", [False, True], ids=["folder", "repository"])
@pytest.mark.parametrize(
    "then",
    [
        ":",
        "git add -A && git commit -qm x",
        "rm -rf .git",
        "rm -rf .git && git init -q && git add . && git commit -qm y",
    ],
    ids=["left", "committed", "removed", "another"],
)
async def test_it_turns_what_was_into_what_is(sandbox: Any, tmp_path: Path, repository: bool, then: str) -> None:
    before = BEFORE + ("git init -q; git add -A; git commit -qm first\n" if repository else "")
    await do(sandbox, before)
    assert await mark_baseline(sandbox)
    twin = tmp_path / "twin"
    shutil.copytree(sandbox.workdir, twin, symlinks=True)
    await do(sandbox, AFTER + (then if repository else ""))
    diff = await working_diff(sandbox)
    assert diff is not None
    assert diff == await working_diff(sandbox)  # asking changes nothing
    apply(diff, twin)
    assert content(twin) == content(Path(sandbox.workdir))
    assert counts(diff)[0] == 6


async def test_nothing_changed_is_an_empty_diff(sandbox: Any) -> None:
    await do(sandbox, BEFORE)
    await mark_baseline(sandbox)
    assert await working_diff(sandbox) == b""


async def test_what_was_uncommitted_before_the_agent_is_not_the_agents(sandbox: Any) -> None:
    await do(sandbox, BEFORE + "git init -q; git add -A; git commit -qm first; echo setup >> a.txt; echo new > n.txt")
    await mark_baseline(sandbox)
    assert await working_diff(sandbox) == b""
    await do(sandbox, "echo agent > b.txt")
    assert counts(await working_diff(sandbox) or b"") == (1, 1, 0)


async def test_ignored_files_do_not_count_unless_the_repository_has_them(sandbox: Any) -> None:
    await do(
        sandbox,
        "git init -q; echo '*.log' > .gitignore; echo x > kept.log; git add -f kept.log .gitignore; git commit -qm x",
    )
    await mark_baseline(sandbox)
    await do(sandbox, "echo y > kept.log; echo z > other.log")
    diff = await working_diff(sandbox)
    assert diff is not None
    assert b"kept.log" in diff
    assert b"other.log" not in diff


async def test_a_folder_below_and_a_home_that_is_the_working_directory(sandbox: Any) -> None:
    await do(sandbox, "mkdir repo; echo a > repo/a; echo b > outside")
    await mark_baseline(sandbox, "repo")
    await do(
        sandbox, "echo changed > repo/a; echo changed > outside; mkdir -p repo/.rollyard; echo x > repo/.rollyard/y"
    )
    diff = await working_diff(sandbox)
    assert diff is not None
    assert counts(diff) == (1, 1, 1)


async def test_no_git_inside_or_no_state_before_is_none(sandbox: Any, crew: Any) -> None:
    assert await working_diff(sandbox) is None
    await do(sandbox, BEFORE)
    await mark_baseline(sandbox)
    await do(sandbox, "rm -rf $HOME/.rollyard")
    assert await working_diff(sandbox) is None
    Path(sandbox.home, "bin").mkdir()
    for program in ("sh", "rm", "mkdir"):
        Path(sandbox.home, "bin", program).symlink_to(f"/bin/{program}")
    sandbox._backend.settings = type(sandbox._backend.settings)(root="/x", path=f"{sandbox.home}/bin")
    assert not await mark_baseline(sandbox)


async def test_a_diff_that_is_too_large_is_an_error(sandbox: Any) -> None:
    await mark_baseline(sandbox)
    await do(sandbox, "head -c 100000 /dev/urandom > large")
    with pytest.raises(SandboxError, match="over 50,000 bytes"):
        await working_diff(sandbox, max_bytes=50_000)


async def test_settings_that_an_agent_plants_run_nothing(sandbox: Any) -> None:
    await do(sandbox, BEFORE + "git init -q; git add -A; git commit -qm first")
    await mark_baseline(sandbox)
    await do(
        sandbox,
        'git config --global diff.evil.textconv "touch $HOME/ran; cat"; git config diff.external "touch $HOME/ran"\n'
        'git config --global diff.external "touch $HOME/ran"; git config --global core.fsmonitor "touch $HOME/ran"\n'
        'git config -f $HOME/.rollyard/baseline/git/config diff.external "touch $HOME/ran"\n'
        'git config -f $HOME/.rollyard/baseline/git/config diff.evil.textconv "touch $HOME/ran; cat"\n'
        'git config -f $HOME/.rollyard/baseline/git/config core.fsmonitor "touch $HOME/ran"\n'
        'echo "*.txt diff=evil" > .gitattributes; echo changed > a.txt',
    )
    diff = await working_diff(sandbox)
    assert b"+changed" in (diff or b"")
    assert not Path(sandbox.home, "ran").exists()
