"""Behaviours: files go in and come out as they are, and never anywhere else."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.conformance.behaviour import Group
from rollyard.stages.conformance.bench import Bench, expect, refused, run, said, same

files: Final = Group("files")

HUGE_BYTES: Final = 50 << 20
MANY: Final = 2000
NAMES: Final = ("Ünï/漢字.txt", "-dash", "a'b\"c $x `y`", "two\nlines", ".hidden", "*")


@files()
async def names(bench: Bench) -> None:
    """UTF-8, quotes, newlines and leading dashes in names and content"""
    folder = bench.name()
    content = {f"{folder}/{name}": f"{name} é漢\U0001f600\r\n\0end" for name in NAMES}
    await bench.sandbox.put_files(content)
    for path, text in content.items():
        same(await bench.sandbox.read_file(path, 1000), text.encode(), f"content of {path!r}")
    listed = (await run(bench.sandbox, f"cd {folder} && find . -type f -print0")).stdout.decode()
    same({entry[2:] for entry in listed.split("\0") if entry}, set(NAMES), "names inside")


@files()
async def empty(bench: Bench) -> None:
    """An empty file is there, and empty"""
    path = f"{bench.name()}/empty"
    await bench.sandbox.put_files({path: b""})
    same(await bench.sandbox.read_file(path, 10), b"", "what is read")
    await said(bench.sandbox, f"test -f {path} && ! test -s {path}")


@files()
async def huge(bench: Bench) -> None:
    """50 MB arrive and come back unchanged"""
    path, block = f"{bench.name()}", os.urandom(1 << 20)
    content = block * (HUGE_BYTES >> 20)
    await bench.sandbox.put_files({path: content})
    inside = await said(bench.sandbox, f"sha256sum {path}", timeout_s=60)
    same(inside[:64], hashlib.sha256(content).hexdigest(), "checksum inside")
    expect(await bench.sandbox.read_file(path, HUGE_BYTES) == content, "what was read back differs")
    await said(bench.sandbox, f"rm {path}")


@files()
async def many(bench: Bench) -> None:
    """2,000 files in one call"""
    folder = bench.name()
    await bench.sandbox.put_files({f"{folder}/{number % 50}/{number}": str(number) for number in range(MANY)})
    same(int(await said(bench.sandbox, f"find {folder} -type f | wc -l")), MANY, "files inside")
    same(await bench.sandbox.read_file(f"{folder}/49/1999", 10), b"1999", "the last one")


@files()
async def replaces(bench: Bench) -> None:
    """A file that is there, even one that may not be written, is replaced; a link is replaced, not followed"""
    folder = bench.name()
    await said(
        bench.sandbox, f"mkdir {folder} && cd {folder} && echo old >f && chmod 444 f && echo kept >t && ln -s t l"
    )
    await bench.sandbox.put_files({f"{folder}/f": "new", f"{folder}/l": "new"})
    same(await said(bench.sandbox, f"cd {folder} && cat f l t"), "newnewkept\n", "content")


@files()
async def escape(bench: Bench) -> None:
    """A path that leaves the folder, or names no file, is refused by name"""
    for path in ("../out", "/abs", "a/../../out", "dir/", "", "..", "a\0b"):
        said_why = await refused(f"the path {path!r}", bench.sandbox.put_files({path: "x"}))
        expect(repr(path)[1:-1] in said_why, f"the refusal does not name {path!r}: {said_why}")


@asynccontextmanager
async def _outside() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollyard-check-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret").write_text("the machine's own")
        yield folder


@files()
async def planted_link(bench: Bench) -> None:
    """A link that leads to this machine's files is not followed by put, get and read"""
    link = bench.name()
    async with _outside() as outside:
        await said(bench.sandbox, f"ln -s {outside} {link}; ln -s {outside}/secret {link}.s")
        for attempt in (
            bench.sandbox.put_files({f"{link}/planted": "x"}),
            bench.sandbox.put_tree(_tar({"planted": b"x"}), link),
        ):
            try:
                await attempt
            except SandboxError:
                continue
        same(sorted(os.listdir(outside)), ["secret"], "files of this machine")  # noqa: PTH208
        for path in (f"{link}/secret", f"{link}.s"):
            try:
                got = await bench.sandbox.read_file(path, 100)
            except SandboxError:
                got = None
            expect(got is None or b"own" not in got, f"read_file({path!r}) gave a file of this machine")
        for path in (f"{link}.s", f"{link}/secret", f"{link}/."):
            try:
                packed = await bench.sandbox.get_tree(path)
            except SandboxError:
                continue
            expect(b"machine's own" not in packed, f"get_tree({path!r}) gave a file of this machine")


@files()
async def home(bench: Bench) -> None:
    """Files for the home are where HOME says"""
    name = bench.name()
    await bench.sandbox.put_files({f".config/{name}": "x"}, base="home")
    same(await said(bench.sandbox, f'cat "$HOME/.config/{name}" && cd && pwd -P'), f"x{bench.sandbox.home}\n", "home")


def _tar(content: dict[str, bytes], kind: str = "w", *, links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=kind) as archive:  # type: ignore[call-overload]
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if name.endswith(".sh") else 0o640
            if name.endswith("/"):
                member.type, member.mode, member.size = tarfile.DIRTYPE, 0o750, 0
                archive.addfile(member)
            else:
                archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@files()
async def tree(bench: Bench) -> None:
    """A tree goes in and comes out with modes, links, and empty folders"""
    folder = bench.name()
    await bench.sandbox.put_tree(
        _tar({"d/": b"", "d/run.sh": b"#!/bin/sh\necho ran\n", "é": b"\0"}, links={"l": "d/run.sh"}), folder
    )
    got = await said(bench.sandbox, f"cd {folder} && ./l && stat -c %a d d/run.sh && readlink l && ls -a d | wc -l")
    same(got, "ran\n750\n755\nd/run.sh\n3\n", "what is inside")
    with tarfile.open(fileobj=io.BytesIO(await bench.sandbox.get_tree(folder))) as archive:
        found = {member.name.rstrip("/"): (member.type, member.mode & 0o777, member.linkname) for member in archive}
    expect(found.keys() >= {folder, f"{folder}/d", f"{folder}/l"}, f"names start elsewhere: {sorted(found)}")
    same(found[f"{folder}/d/run.sh"][:2], (tarfile.REGTYPE, 0o755), "the program that came out")
    same(found[f"{folder}/l"][::2], (tarfile.SYMTYPE, "d/run.sh"), "the link that came out")


@files()
async def tree_forms(bench: Bench) -> None:
    """Archives may be gzipped or files; a folder's own content, one file, and all but what is excluded come out"""
    folder = bench.name()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "tree.tar.gz")
        path.write_bytes(_tar({"a": b"1", "b.log": b"2", "c/d": b"3"}, "w:gz"))
        await bench.sandbox.put_tree(path, folder)
    same(_names(await bench.sandbox.get_tree(f"{folder}/c/d")), {"d"}, "one file")
    same(
        _names(await bench.sandbox.get_tree(f"{folder}/.", exclude=("*.log",))),
        {"a", "c", "c/d"},
        "content without logs",
    )
    await said(bench.sandbox, f"cd && mkdir -p {folder} && echo x >{folder}/y")
    same(
        _names(await bench.sandbox.get_tree(f"{bench.sandbox.home}/{folder}")),
        {folder, f"{folder}/y"},
        "an absolute folder",
    )


def _names(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {os.path.normpath(name) for name in opened.getnames()} - {"."}


@files()
async def tree_escape(bench: Bench) -> None:
    """An archive with a member that leaves its folder is refused, or that member left out"""
    folder = bench.name()
    archives = {
        "..": _tar({"../planted": b"x"}),
        "an absolute name": _tar({f"/tmp/{folder}/planted": b"x"}),
        "a link": _tar({"l/planted": b"x"}, links={"l": f"/tmp/{folder}"}),
    }
    await said(bench.sandbox, f"mkdir -p /tmp/{folder}")
    for what, archive in archives.items():
        try:
            await bench.sandbox.put_tree(archive, f"{folder}/in")
        except SandboxError:
            continue
        found = await run(bench.sandbox, f"ls {folder}/planted planted /tmp/{folder}/planted")
        same(found.stdout, b"", f"files written outside by {what}")


@files()
async def tree_limits(bench: Bench) -> None:
    """A tree over the cap, and one that is not there, are refused"""
    folder = bench.name()
    await said(bench.sandbox, f"mkdir {folder} && head -c 3000000 /dev/zero >{folder}/f")
    await refused("a tree over max_bytes", bench.sandbox.get_tree(folder, max_bytes=1_000_000))
    await refused("a tree that is not there", bench.sandbox.get_tree(f"{folder}/nowhere"))
    same(_names(await bench.sandbox.get_tree(folder, max_bytes=4_000_000)), {folder, f"{folder}/f"}, "names")


@files()
async def reading(bench: Bench) -> None:
    """The beginning of a file is read; nothing of a folder, a missing file or a named pipe, and nothing waits for it"""
    folder = bench.name()
    await said(bench.sandbox, f"mkdir -p {folder}/d && printf 0123456789 >{folder}/f && mkfifo {folder}/p")
    same(await bench.sandbox.read_file(f"{folder}/f", 4), b"0123", "the beginning")
    same(await bench.sandbox.read_file(f"{bench.sandbox.workdir}/{folder}/f", 100), b"0123456789", "an absolute path")
    for name in ("d", "missing", "f/x", "p"):
        same(await bench.sandbox.read_file(f"{folder}/{name}", 10), None, f"what is read of {name!r}")
