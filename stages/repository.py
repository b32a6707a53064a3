"""Repositories of tasks: fetched once for a machine, handed to sandboxes as archives.

    <cache>/repositories/<key>/bare.git       everything that was ever fetched from one URL
    <cache>/repositories/<key>/<commit>.*.tar a working directory at one commit, with a .git of its own
    <cache>/locks/<key>                       held while somebody changes that folder
    <cache>/in-use/                           links to archives that are being unpacked

Several workers of a machine may share the cache. What was used longest ago is removed when it grows over its limit.
Submodules are not fetched: their folders are empty.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import Repository
from rollyard.schemas.subjects import digest
from rollyard.stages.git import GitFailed, file_url, git, hidden, run

log = structlog.get_logger(__name__)

FRESH_S: Final = 300.0
"""A branch or tag is looked up again after so long."""
LEFT_BEHIND_S: Final = 86_400.0
_HASH: Final = re.compile(r"[0-9a-f]{40}\Z")
_SHORT: Final = re.compile(r"[0-9a-f]{7,40}\Z")
_EVERYTHING: Final = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")


class RepositoryCache:
    """The repositories of one machine, under `folder`, of about `max_bytes` together."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder.absolute()
        self._max_bytes = max_bytes
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def archive(self, wanted: Repository) -> AsyncIterator[Path]:
        """A tar archive of the wanted commit's files and their .git, for the time of the block.

        Raises SandboxError that names the repository or the commit which is not there. Cancelling ends git.
        """
        key = digest(wanted.url, chars=32)
        kind = "whole" if wanted.history else "single"
        held = self._hold(key, f"{wanted.commit}.{kind}.tar") if _HASH.match(wanted.commit) else None
        if held is None:
            async with self._locked(key) as folder:
                commit = await self._commit(folder / "bare.git", wanted)
                name = f"{commit}.{kind}.tar"
                if not (folder / name).exists():
                    await _make_archive(folder, commit, name, history=wanted.history)
                    await self._trim(key, {folder / name, folder / "bare.git"})
                held = self._hold(key, name)
                if held is None:
                    raise SandboxError(f"the archive {folder / name} is gone", hint="does somebody clean the cache?")
        try:
            yield held
        finally:
            held.unlink(missing_ok=True)

    def _hold(self, key: str, name: str) -> Path | None:
        """A link to an archive, which outlives its removal from the cache; None: there is no such archive."""
        archive = self._folder / "repositories" / key / name
        link = self._folder / "in-use" / f"{secrets.token_hex(8)}.tar"
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            os.utime(archive)
            link.hardlink_to(archive)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SandboxError(
                f"the cache {self._folder} cannot be used: {error}", hint="see [worker] cache"
            ) from error
        return link

    @asynccontextmanager
    async def _locked(self, key: str) -> AsyncIterator[Path]:
        """The folder of a repository, for one task of one process at a time."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            folder, lock = self._folder / "repositories" / key, self._folder / "locks" / key
            try:
                for each in (folder, lock.parent):
                    each.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise SandboxError(
                    f"the cache {self._folder} cannot be used: {error}", hint="see [worker] cache"
                ) from error
            try:
                pause_s = 0.01
                while not _try_lock(file):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 0.5)
                folder.mkdir(mode=0o700, exist_ok=True)  # it may have been removed meanwhile
                yield folder
            finally:
                os.close(file)

    async def _commit(self, bare: Path, wanted: Repository) -> str:
        """The hash of the wanted commit, which is in `bare` now."""
        await _make_bare(bare)
        (bare / "used").touch()
        fixed = bool(_HASH.match(wanted.commit))
        if (fixed or _age_s(bare / "fetched") < FRESH_S) and (found := await _resolve(bare, wanted.commit)):
            return found
        troubles, reached = [], False
        for source in filter(None, (wanted.mirror, wanted.url)):
            try:
                await _fetch(bare, source, wanted.commit)
            except GitFailed as error:
                troubles.append(f"{hidden(source)}: {error.message}")
                continue
            reached = True
            if found := await _resolve(bare, wanted.commit):
                (bare / "fetched").touch()
                return found
        name = hidden(wanted.url)
        if not reached:
            raise SandboxError(
                f"the repository {name} cannot be fetched: {'; '.join(troubles)}",
                hint="see sandbox.repository, and try `git ls-remote` where INIT works",
            )
        what = f"commit, branch or tag {wanted.commit!r}" if wanted.commit else "default branch"
        raise SandboxError(f"the repository {name} has no {what}", hint="see sandbox.repository.commit")

    async def _trim(self, ours: str, spared: set[Path]) -> None:
        """Remove what was used longest ago until the rest fits, but `spared`. The caller holds the key `ours`."""
        entries = await asyncio.to_thread(lambda: sorted(self._entries(), key=lambda entry: entry[0]))
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self._max_bytes:
                return
            if path not in spared and await asyncio.to_thread(self._remove, path, path.parent.name != ours):
                log.info("cache_trimmed", path=str(path), bytes=size)
                total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of every archive and bare repository; forgets links that dead workers left."""
        for link in (self._folder / "in-use").glob("*.tar"):
            if _age_s(link) > LEFT_BEHIND_S:
                link.unlink(missing_ok=True)
        for folder in (self._folder / "repositories").iterdir():
            with suppress(FileNotFoundError):
                for path in folder.iterdir():
                    if path.suffix == ".tar":
                        yield path.stat().st_mtime, path.stat().st_size, path
                    elif path.name == "bare.git":
                        yield time.time() - _age_s(path / "used"), _bytes_below(path), path

    def _remove(self, path: Path, lock: bool) -> bool:
        """Remove an archive or a bare repository, unless somebody else is at it."""
        file = os.open(self._folder / "locks" / path.parent.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if lock and not _try_lock(file):
                return False
            _forget(path)
            return True
        finally:
            os.close(file)


async def _make_bare(bare: Path) -> None:
    """An empty repository, if there is none that was made to its end; and nothing in the way of the next fetch."""
    if not (bare / "made").exists():
        await asyncio.to_thread(shutil.rmtree, bare, True)
        await git("init", "-q", "--bare", "--template=", str(bare))
        for name, value in (("gc.auto", "0"), ("maintenance.auto", "false"), ("uploadpack.allowAnySHA1InWant", "true")):
            await git("--git-dir", str(bare), "config", name, value)
        (bare / "made").touch()
    # We hold the repository alone: whoever made these was killed.
    for left in (*bare.rglob("*.lock"), *bare.glob("objects/pack/tmp_*"), *bare.glob("objects/incoming-*")):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


async def _fetch(bare: Path, source: str, commit: str) -> None:
    """Fetch branches and tags of `source`, and the commit where it is in none of them. Raises GitFailed."""
    at = ("--git-dir", str(bare), "fetch", "-q", "--force", "--no-tags", "--no-write-fetch-head")
    try:
        await git(*at, "--", source, *_EVERYTHING, remote=True)
    except GitFailed:
        # A branch may have become a folder of branches. What is in the way goes, and is fetched again.
        await git(*at, "--prune", "--", source, *_EVERYTHING, remote=True)
    if not commit:
        with suppress(GitFailed):  # a bundle may have no HEAD
            await git(*at, "--", source, "+HEAD:refs/rollyard/head", remote=True)
    elif _HASH.match(commit) and not await _resolve(bare, commit):
        with suppress(GitFailed):
            await git(*at, "--", source, f"+{commit}:refs/rollyard/{commit}", remote=True)


async def _resolve(bare: Path, commit: str) -> str:
    """The hash that a name stands for in `bare`; empty: nothing."""
    at = ("--git-dir", str(bare))
    names = [f"refs/heads/{commit}", f"refs/tags/{commit}"]
    if not commit:
        heads = (await git(*at, "for-each-ref", "--format=%(refname)", "refs/heads")).split()
        names = ["refs/rollyard/head", *(heads if len(heads) == 1 else ())]
    elif _SHORT.match(commit):
        names.append(commit)
    for name in names:
        with suppress(GitFailed):
            return (await git(*at, "rev-parse", "-q", "--verify", "--end-of-options", f"{name}^{{commit}}")).strip()
    return ""


async def _make_archive(folder: Path, commit: str, name: str, *, history: bool) -> None:
    """Write the archive of a commit. Its .git reaches that commit, with `history` those before it and their tags, and
    nothing else: no remote, no reflog, no other object."""
    bare, making = folder / "bare.git", folder / f".making-{secrets.token_hex(8)}"
    for left in folder.glob(".making-*"):
        await asyncio.to_thread(shutil.rmtree, left, True)
    tree, aside = making / "tree", making / name
    at = ("-C", str(tree), "-c", "core.logAllRefUpdates=false", "-c", "fetch.unpackLimit=1")
    try:
        tree.mkdir(parents=True)
        await git("init", "-q", "--template=", "--initial-branch=main", str(tree))
        wanted = [commit]
        if history:
            wanted += [f"{tag}:{tag}" for tag in await _tags(bare, commit)]
        depth = () if history else ("--depth=1",)
        refs = "\n".join(wanted).encode()
        await git(
            *at, "fetch", "-q", "--no-tags", "--no-write-fetch-head", *depth, "--stdin", file_url(bare), stdin=refs
        )
        await git(*at, "checkout", "-q", "--force", "-B", "main", commit)
        for rest in ("FETCH_HEAD", "ORIG_HEAD", "logs", "hooks", "branches"):
            await asyncio.to_thread(_forget, tree / ".git" / rest)
        if (tree / ".gitmodules").exists():
            log.warning("submodules_not_fetched", repository=folder.name, commit=commit)
        await run(("tar", "-C", str(tree), "--owner=0", "--group=0", "--numeric-owner", "-cf", str(aside), "."))
        await asyncio.to_thread(_sync, aside)
        aside.rename(folder / name)
    except OSError as error:
        raise SandboxError(f"the archive of {commit} cannot be written: {error}", hint="see [worker] cache") from error
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, making, True))


async def _tags(bare: Path, commit: str) -> list[str]:
    listed = await git("--git-dir", str(bare), "for-each-ref", "--format=%(refname)", f"--merged={commit}", "refs/tags")
    return listed.split()


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _age_s(path: Path) -> float:
    """Seconds since it was touched; endless when it is not there."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _bytes_below(folder: Path) -> int:
    return sum((Path(top) / name).lstat().st_size for top, _, names in os.walk(folder) for name in names)


def _forget(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
