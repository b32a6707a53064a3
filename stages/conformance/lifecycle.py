"""Behaviours: sandboxes begin as they were asked for, and when they end nothing is left."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from rollyard.schemas.errors import SandboxError
from rollyard.stages.conformance.behaviour import Group, flag
from rollyard.stages.conformance.bench import (
    Bench,
    NotTold,
    expect,
    nap,
    on_this_machine,
    refused,
    said,
    same,
    script_command,
)
from rollyard.stages.sandbox import Change

lifecycle: Final = Group("lifecycle")

_KINDS: Final[tuple[Literal["modified", "deleted"], ...]] = ("modified", "deleted")


@lifecycle()
async def begins_empty(bench: Bench) -> None:
    """Working directory and home are there, empty, writable, and not those of another sandbox"""
    async with bench.fresh() as one, bench.fresh() as other:
        expect(one.ref != other.ref, "two sandboxes have one reference")
        await one.put_files({"mine": "x"})
        same(await other.read_file("mine", 10), None, "the file of another sandbox")
        same(await said(other, 'ls -A; echo x >f; echo x >"$HOME/f"'), "", "what is in the working directory")


@lifecycle(flag("workdirs", "it has a working directory of its own"))
async def workdir(bench: Bench) -> None:
    """The working directory is the one that was asked for"""
    async with bench.fresh(workdir="/srv/a task") as sandbox:
        same((sandbox.workdir, await said(sandbox, "pwd")), ("/srv/a task", "/srv/a task\n"), "directory")
        await sandbox.put_files({"f": "x"})
        same(await said(sandbox, "cat '/srv/a task/f'"), "x", "a file in it")
        same((await bench.backend.open(sandbox.ref)).workdir, "/srv/a task", "directory seen by another")


@lifecycle(flag("users", "it has one user only"))
async def user(bench: Bench) -> None:
    """Everything runs as the user that was asked for, who may write the working directory and the home"""
    async with bench.fresh(user="65534") as sandbox:
        same(await said(sandbox, 'id -u; echo x >f; echo x >"$HOME/f"; ls'), "65534\nf\n", "user")
        await sandbox.put_files({"g": "x"})
        await said(sandbox, "echo y >>g")
        await sandbox.start("u", script_command("id -u"), deadline_s=30)
        await sandbox.wait("u")
        same((await sandbox.output("u", 100))[0], b"65534\n", "user of a detached process")
        again = await bench.backend.open(sandbox.ref)
        same(await said(again, "id -u"), "65534\n", "user seen by another")


@lifecycle()
async def destroyed_twice(bench: Bench) -> None:
    """Destroying it twice, and from two places at a time, is no error"""
    async with bench.fresh() as sandbox:
        other = await bench.backend.open(sandbox.ref)
        async with asyncio.TaskGroup() as group:
            group.create_task(sandbox.destroy())
            group.create_task(other.destroy())
        await sandbox.destroy()


@lifecycle()
async def destroyed_at_work(bench: Bench) -> None:
    """Destroying it ends all that runs in it, detached, executed and in shells"""
    seconds = nap()
    async with bench.fresh() as sandbox, await sandbox.shell() as shell:
        await sandbox.start("agent", script_command(f"setsid sleep {seconds}"), deadline_s=100)
        await shell.run(f"setsid sleep {seconds} &", timeout_s=20)
        running = asyncio.ensure_future(sandbox.exec(f"sleep {seconds}", timeout_s=100))
        await asyncio.sleep(0.5)
        await sandbox.destroy()
        try:
            async with asyncio.timeout(20):
                await running
        except SandboxError:
            pass
        except TimeoutError:
            expect(False, "a command that was under way still waits")
    for _ in range(60):
        if not on_this_machine(f"sleep\0{seconds}"):
            return
        await asyncio.sleep(0.05)
    expect(False, "a process of the destroyed sandbox still runs")


@lifecycle()
async def gone(bench: Bench) -> None:
    """A sandbox that was destroyed refuses everything but to be destroyed again"""
    async with bench.fresh() as sandbox:
        ref = sandbox.ref
        await sandbox.destroy()
        try:
            again = await bench.backend.open(ref)
        except SandboxError:
            again = sandbox
        await refused("exec", again.exec("true", timeout_s=10))
        await refused("put_files", again.put_files({"f": "x"}))
        await refused("start", again.start("late", script_command("true"), deadline_s=10))
        await refused("a shell", again.shell())
        await again.destroy()


@lifecycle()
async def stats(bench: Bench) -> None:
    """What it uses is told while something runs, as far as the backend can"""
    async with bench.fresh() as sandbox:
        await sandbox.start("agent", script_command("sleep 1000"), deadline_s=100)
        await asyncio.sleep(0.3)
        told = await sandbox.stats()
        for field, least in (("memory_bytes", 1), ("processes", 1), ("cpu_s", 0.0), ("disk_bytes", 0)):
            value = getattr(told, field)
            expect(value is None or least <= value < 1 << 40, f"{field} is {value}")


@lifecycle(flag("snapshots", "it makes no snapshots"), max_s=120)
async def snapshot(bench: Bench) -> None:
    """A snapshot is an image: a sandbox made from it has the files"""
    if not bench.setting.image:
        raise NotTold("an image is needed: give --image")
    async with bench.fresh() as sandbox:
        await sandbox.put_files({"kept": "x"})
        await said(sandbox, "echo y >/etc/kept-too && chmod 640 kept")
        image = await sandbox.snapshot()
        await sandbox.put_files({"later": "x"})
    async with bench.fresh(image=image) as sandbox:
        same(await said(sandbox, "cat kept /etc/kept-too; ls"), "xy\nkept\n", "files")


@lifecycle(flag("diff", "it cannot compare"))
async def diff(bench: Bench) -> None:
    """What was added, changed and deleted is told"""
    async with bench.fresh() as sandbox:
        await said(sandbox, "echo x >new && mkdir d && echo x >d/f")
        listed = await said(
            sandbox, "find /etc -maxdepth 1 -type f -writable -size -100k ! -name 'host*' ! -name 'res*' | head -n 2"
        )
        wanted = {Change(f"{sandbox.workdir}/{path}", "added") for path in ("new", "d/f")}
        for path, action, kind in zip(listed.split(), ("echo >>", "rm "), _KINDS, strict=False):
            await said(sandbox, f"{action}{path}")
            wanted.add(Change(path, kind))
        found = set(await sandbox.diff())
        same(wanted - found, set(), "changes that are not told")


@lifecycle(flag("images", "it has no images"))
async def missing_image(bench: Bench) -> None:
    """An image that is not there is refused by name, and leaves nothing behind"""
    labels, image = bench.labels(), "rollyard-check-no-such-image"
    said_why = await refused("an image that is not there", bench.backend.create(labels, bench.plan(image=image)))
    expect(image in said_why, f"the refusal does not name it: {said_why}")
    owned = [known.rollout_id for _, known in await bench.backend.list_owned()]
    expect(labels.rollout_id not in owned, "a sandbox was left behind")
