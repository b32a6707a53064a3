"""Repositories: fetched once, at the wanted commit, with nothing of what came after it or before."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import Repository
from rollyard.stages import git as git_module
from rollyard.stages.git import GitFailed, git, hidden
from rollyard.stages.repository import RepositoryCache

IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": os.devnull,
}


def run_git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], env=os.environ | IDENTITY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Upstream:
    """A repository with four commits on `main`, tags at the first and the last, and a branch beside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        run_git(folder, "init", "-q", "-b", "main")
        self.commits = [self.commit(f"v{number}") for number in range(4)]
        run_git(folder, "tag", "first", self.commits[0])
        run_git(folder, "tag", "-a", "-m", "the last", "last", self.commits[3])
        run_git(folder, "checkout", "-q", "-b", "beside", self.commits[1])
        self.beside = self.commit("beside")
        run_git(folder, "checkout", "-q", "main")
        self.url = folder.as_uri()

    def commit(self, text: str) -> str:
        (self.folder / "file.txt").write_text(text)
        (self.folder / "run.sh").write_text("#!/bin/sh\n")
        (self.folder / "run.sh").chmod(0o755)
        link = self.folder / "link"
        if not link.is_symlink():
            link.symlink_to("/etc/passwd")
        run_git(self.folder, "add", "-A")
        run_git(self.folder, "commit", "-q", "-m", text)
        return run_git(self.folder, "rev-parse", "HEAD")


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream")


@pytest.fixture
def cache(tmp_path: Path) -> RepositoryCache:
    return RepositoryCache(tmp_path / "cache", 1 << 30)


async def unpacked(cache: RepositoryCache, wanted: Repository, to: Path) -> Path:
    async with cache.archive(wanted) as archive:
        with tarfile.open(archive) as tar:
            tar.extractall(to, filter="fully_trusted")
    assert list((to.parent / "cache" / "in-use").iterdir()) == []
    return to


def reachable(tree: Path) -> set[str]:
    """Every commit that the object store of a checkout holds, reachable or not."""
    listed = run_git(tree, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    return {line.split()[1] for line in listed.splitlines() if line.startswith("commit ")}


async def test_without_history_there_is_one_commit_and_nothing_leads_elsewhere(
    upstream: Upstream, cache: RepositoryCache, tmp_path: Path
) -> None:
    wanted = upstream.commits[1]
    tree = await unpacked(cache, Repository(url=upstream.url, commit=wanted), tmp_path / "tree")
    assert (tree / "file.txt").read_text() == "v1"
    assert os.access(tree / "run.sh", os.X_OK)
    assert (tree / "link").readlink() == Path("/etc/passwd")
    assert run_git(tree, "rev-parse", "HEAD") == wanted
    assert run_git(tree, "rev-list", "--all").split() == [wanted]
    assert reachable(tree) == {wanted}
    assert run_git(tree, "status", "--porcelain") == ""
    assert run_git(tree, "remote") == ""
    assert run_git(tree, "tag") == ""
    assert run_git(tree, "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
    left = {path.name for path in (tree / ".git").iterdir()}
    assert not left & {"FETCH_HEAD", "ORIG_HEAD", "logs", "hooks", "packed-refs"}
    assert str(upstream.folder) not in (tree / ".git/config").read_text()


async def test_with_history_there_is_what_came_before_and_nothing_later(
    upstream: Upstream, cache: RepositoryCache, tmp_path: Path
) -> None:
    wanted = Repository(url=upstream.url, commit=upstream.commits[2], history=True)
    tree = await unpacked(cache, wanted, tmp_path / "tree")
    assert reachable(tree) == set(upstream.commits[:3])
    assert run_git(tree, "tag").split() == ["first"]
    assert run_git(tree, "remote") == ""


@pytest.mark.parametrize(
    ("commit", "content"),
    [("", "v3"), ("main", "v3"), ("first", "v0"), ("last", "v3"), ("beside", "beside")],
)
async def test_branches_tags_and_the_default_branch(
    upstream: Upstream, cache: RepositoryCache, tmp_path: Path, commit: str, content: str
) -> None:
    tree = await unpacked(cache, Repository(url=upstream.url, commit=commit), tmp_path / "tree")
    assert (tree / "file.txt").read_text() == content


async def test_a_short_hash_and_a_plain_path(upstream: Upstream, cache: RepositoryCache, tmp_path: Path) -> None:
    wanted = Repository(url=str(upstream.folder), commit=upstream.commits[2][:10])
    assert (await unpacked(cache, wanted, tmp_path / "tree") / "file.txt").read_text() == "v2"


async def test_a_bundle(upstream: Upstream, cache: RepositoryCache, tmp_path: Path) -> None:
    bundle = tmp_path / "all.bundle"
    run_git(upstream.folder, "bundle", "create", str(bundle), "--all")
    wanted = Repository(url=str(bundle), commit=upstream.commits[1])
    assert (await unpacked(cache, wanted, tmp_path / "tree") / "file.txt").read_text() == "v1"


async def test_a_commit_that_no_branch_holds_any_more(
    upstream: Upstream, cache: RepositoryCache, tmp_path: Path
) -> None:
    run_git(upstream.folder, "branch", "-D", "beside")
    run_git(upstream.folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    wanted = Repository(url=upstream.url, commit=upstream.beside)
    assert (await unpacked(cache, wanted, tmp_path / "tree") / "file.txt").read_text() == "beside"


async def test_what_is_there_is_not_fetched_again(upstream: Upstream, cache: RepositoryCache, tmp_path: Path) -> None:
    first = Repository(url=upstream.url, commit=upstream.commits[1])
    await unpacked(cache, first, tmp_path / "a")
    shutil.rmtree(upstream.folder)
    await unpacked(cache, first, tmp_path / "b")
    other = Repository(url=upstream.url, commit=upstream.commits[3], history=True)
    tree = await unpacked(RepositoryCache(tmp_path / "cache", 1 << 30), other, tmp_path / "c")
    assert (tree / "file.txt").read_text() == "v3"
    # A branch that was looked up a moment ago stands.
    assert (await unpacked(cache, Repository(url=upstream.url, commit="main"), tmp_path / "d") / "file.txt").exists()


async def test_many_at_once_fetch_once(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches: list[tuple[str, ...]] = []

    async def counted(*arguments: str, remote: bool = False, stdin: bytes = b"") -> str:
        if remote:
            fetches.append(arguments)
            await asyncio.sleep(0.2)
        return await git(*arguments, remote=remote, stdin=stdin)

    monkeypatch.setattr("rollyard.stages.repository.git", counted)
    # Two processes of one machine share the folder: two caches.
    caches = [RepositoryCache(tmp_path / "cache", 1 << 30) for _ in range(2)]
    wanted = Repository(url=upstream.url, commit=upstream.commits[1])

    async def one(number: int) -> int:
        async with caches[number % 2].archive(wanted) as archive:
            return archive.stat().st_size

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(12)]
    assert len({task.result() for task in tasks}) == 1
    assert len(fetches) == 1


async def test_a_mirror_comes_first_and_the_url_mends_it(
    upstream: Upstream, cache: RepositoryCache, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    run_git(tmp_path, "clone", "-q", "--mirror", str(upstream.folder), str(mirror))
    nowhere = "https://127.0.0.1:1/nothing.git"
    wanted = Repository(url=nowhere, mirror=str(mirror), commit=upstream.commits[2])
    assert (await unpacked(cache, wanted, tmp_path / "a") / "file.txt").read_text() == "v2"
    newer = upstream.commit("newer")
    stale = Repository(url=upstream.url, mirror=str(mirror), commit=newer)
    assert (await unpacked(cache, stale, tmp_path / "b") / "file.txt").read_text() == "newer"


@pytest.mark.parametrize(
    ("url", "commit", "says"),
    [
        ("/nowhere/at/all", "", r"the repository /nowhere/at/all cannot be fetched: .*does not appear to be a git"),
        ("https://u:secret@127.0.0.1:1/x.git", "", r"the repository https://127\.0\.0\.1:1/x\.git cannot be fetched"),
        ("ext::sh -c touch% /tmp/never", "", r"cannot be fetched: .*transport 'ext' not allowed"),
    ],
    ids=["path", "password", "helper"],
)
async def test_a_repository_that_is_not_there_is_named(
    cache: RepositoryCache, url: str, commit: str, says: str
) -> None:
    with pytest.raises(SandboxError, match=says) as caught:
        async with cache.archive(Repository(url=url, commit=commit)):
            pass
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("commit", ["0" * 40, "no-such-branch", "--upload-pack=touch", "main..beside", "@{-1}"])
async def test_a_commit_that_is_not_there_is_named(upstream: Upstream, cache: RepositoryCache, commit: str) -> None:
    with pytest.raises(SandboxError, match=f"has no commit, branch or tag '{commit}'".replace("{", r"\{")):
        async with cache.archive(Repository(url=upstream.url, commit=commit)):
            pass


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[str]:
    """The URL of a git server that never answers."""
    import socket  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"git://127.0.0.1:{server.getsockname()[1]}/x.git"


async def test_a_fetch_that_hangs_is_killed_with_its_helpers(cache: RepositoryCache, deaf: str) -> None:
    before = git_processes()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.7), cache.archive(Repository(url=deaf)):
            pass
    assert git_processes() - before == set()
    # And nothing stands in the way of the next one.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), cache.archive(Repository(url=deaf)):
            pass


def git_processes() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"git" in path.read_bytes().split(b"\0")[0]:
                found.add(path.parent.name)
    return found


async def test_what_a_killed_fetch_left_does_no_harm(
    upstream: Upstream, cache: RepositoryCache, tmp_path: Path
) -> None:
    await unpacked(cache, Repository(url=upstream.url, commit=upstream.commits[0]), tmp_path / "a")
    (folder,) = (tmp_path / "cache/repositories").iterdir()
    for name in ("packed-refs.lock", "refs/heads/main.lock", "shallow.lock", "config.lock"):
        (folder / "bare.git" / name).touch()
    (folder / ".making-1").mkdir()
    newer = upstream.commit("newer")
    assert (await unpacked(cache, Repository(url=upstream.url, commit=newer), tmp_path / "b")).exists()
    assert sorted(path.suffix for path in folder.iterdir()) == [".git", ".tar", ".tar"]
    shutil.rmtree(folder / "bare.git" / "objects")
    (folder / "bare.git" / "made").unlink()
    wanted = Repository(url=upstream.url, commit=upstream.commits[2])
    assert (await unpacked(cache, wanted, tmp_path / "c")).exists()


async def test_it_stays_within_its_bytes_and_keeps_what_was_used_last(upstream: Upstream, tmp_path: Path) -> None:
    (upstream.folder / "large").write_bytes(os.urandom(1_000_000))
    commits = [upstream.commit(f"large {number}") for number in range(4)]
    cache = RepositoryCache(tmp_path / "cache", 7_000_000)
    for number, commit in enumerate(commits):
        await unpacked(cache, Repository(url=upstream.url, commit=commit), tmp_path / str(number))
        for path in (tmp_path / "cache").rglob("*.tar"):
            os.utime(path, (time.time() - 100 + number, time.time() - 100 + number))
            break
    left = {path.name.partition(".")[0] for path in (tmp_path / "cache/repositories").rglob("*.tar")}
    assert commits[3] in left
    assert 1 <= len(left) < 4
    # What was removed is made again.
    assert (await unpacked(cache, Repository(url=upstream.url, commit=commits[0]), tmp_path / "x")).exists()


async def test_submodules_are_empty_folders(upstream: Upstream, cache: RepositoryCache, tmp_path: Path) -> None:
    inner = Upstream(tmp_path / "inner")
    run_git(upstream.folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", inner.url, "sub")
    wanted = Repository(url=upstream.url, commit=upstream.commit("with a submodule"))
    tree = await unpacked(cache, wanted, tmp_path / "tree")
    assert list((tree / "sub").iterdir()) == []


async def test_a_machine_without_git_says_so(cache: RepositoryCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="git is not installed where INIT works"):
        async with cache.archive(Repository(url="/x")):
            pass


def test_no_password_is_told() -> None:
    assert hidden("fatal: https://a:b@host/x and ssh://git@h/y") == "fatal: https://host/x and ssh://h/y"
    assert issubclass(GitFailed, SandboxError)
    assert "ext" not in git_module.PROTOCOLS.split(":")
