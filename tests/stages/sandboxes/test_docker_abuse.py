"""Agents that do their worst in a container, and managers that are killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import docker_engine
import pytest

from rollyard.harnesses.harness import Command
from rollyard.schemas.sandbox import Limits
from rollyard.stages.sandbox import Labels, Plan, ProcessEnd
from rollyard.stages.sandboxes.docker import DockerBackend

LABELS = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)
SMALL = Plan(network="none", limits=Limits(max_processes=64, memory_bytes=256 << 20, max_file_bytes=4 << 20))
BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
MANAGER = """
import asyncio, sys
from rollyard.harnesses.harness import Command
from rollyard.stages.sandbox import Labels, Plan, open_backend
async def main():
    settings = {"root": "/nowhere", "installation": sys.argv[1], "image": sys.argv[2], "pull": False, "warm": 1}
    async with open_backend("docker", settings) as backend:
        labels = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)
        sandbox = await backend.create(labels, Plan(network="none"))
        print("made", flush=True)
        await sandbox.put_files({"a": "b"})
        await sandbox.start("agent", Command(("sh", "-c", "echo x >>count; sleep 4; exit 5")), deadline_s=60)
        print("started", flush=True)
        await sandbox.wait("agent")
asyncio.run(main())
"""


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    docker_engine.require()
    image = docker_engine.root_image()
    settings = {"root": str(tmp_path), "installation": uuid.uuid4().hex, "image": image, "pull": False}
    async with DockerBackend.from_settings(settings) as backend:
        yield backend
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


async def test_a_fork_bomb_ends_at_its_deadline_and_when_it_is_killed(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, SMALL)
    await sandbox.start("bomb", Command(("python3", "-c", BOMB)), deadline_s=2)
    assert await sandbox.wait("bomb") == ProcessEnd(-9, "deadline")
    assert (await sandbox.exec("echo on", timeout_s=30)).stdout == b"on\n"
    await sandbox.start("again", Command(("python3", "-c", BOMB)), deadline_s=60)
    await asyncio.sleep(1)
    await sandbox.kill("again")
    assert await sandbox.wait("again") == ProcessEnd(-9, "killed")
    assert (await sandbox.exec("echo on", timeout_s=30)).stdout == b"on\n"


async def test_a_fork_bomb_is_ended_by_who_comes_later(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, SMALL)
    await sandbox.start("bomb", Command(("python3", "-c", BOMB)), deadline_s=60)
    await asyncio.sleep(1)
    await sandbox.close_channels()
    other = await backend.open(sandbox.ref)  # no program can be run in it
    await other.kill("bomb")
    assert (await other.wait("bomb")).exit_code == -9
    assert (await other.exec("echo on", timeout_s=30)).stdout == b"on\n"


async def test_a_flood_fills_neither_memory_nor_disk(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, SMALL)
    done = await sandbox.exec("yes | head -c 1000000000; echo end", timeout_s=60)
    assert (done.exit_code, len(done.stdout), done.stdout[-4:], done.truncated) == (0, 65536, b"end\n", True)
    await sandbox.start("agent", Command(("sh", "-c", "yes; echo $? >&2")), deadline_s=60)
    assert (await sandbox.wait("agent")).reason == "exited"
    out, err = await sandbox.output("agent", 1000)
    assert (len(out), err.split()[-1]) == (1000, b"153")  # SIGXFSZ
    assert ((await sandbox.stats()).disk_bytes or 0) < 16 << 20


async def test_what_an_agent_does_to_itself_and_others_is_over_when_wait_returns(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, SMALL)
    worst = {
        "ignores": "trap '' TERM INT HUP; while :; do sleep 1; done",
        "daemon": "env -i setsid sh -c 'trap \"\" TERM; env -i setsid sleep 1000 & sleep 1000' & exit 0",
        "killer": "env -i setsid sleep 1000 & sleep 0.2; kill -9 -1; sleep 1000",
        "homeless": "rm -rf ~ /rollyard/* 2>/dev/null; env -i setsid sleep 1000 & kill -9 $PPID; sleep 1000",
    }
    for name, script in worst.items():
        await sandbox.start(name, Command(("sh", "-c", script)), deadline_s=2)
        end = await sandbox.wait(name)
        assert end.reason == {"ignores": "deadline", "daemon": "exited"}.get(name, "lost"), name
        left = await sandbox.exec("for f in /proc/[0-9]*/comm; do read -r c <$f; echo $c; done", cwd="/", timeout_s=30)
        # One is the container's first process, one our command's time limit.
        assert left.stdout.split().count(b"sleep") <= 2, name


@pytest.mark.parametrize("word", ["", "made", "started"])
async def test_a_manager_that_is_killed_leaves_what_can_be_found(backend: DockerBackend, word: str) -> None:
    argv = [sys.executable, "-c", MANAGER, backend.settings.installation, docker_engine.root_image()]
    manager = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    assert manager.stdout is not None
    try:
        async with asyncio.timeout(40):
            if word:
                while (await manager.stdout.readline()).strip() != word.encode():
                    pass
            else:
                while not await backend.list_owned():  # noqa: ASYNC110 - the engine is looked at
                    await asyncio.sleep(0.01)
    finally:
        manager.send_signal(signal.SIGKILL)
        await manager.wait()
    owned = await backend.list_owned()
    agents = [ref for ref, labels in owned if labels.role == "agent"]
    # The engine may give up what it was making for a client that has gone.
    assert len(agents) == 1 or (not word and not agents)
    assert {labels.owner for _, labels in owned} <= {"worker"}
    if word:
        sandbox = await backend.open(agents[0])
        command = Command(("sh", "-c", "echo x >>count; exit 6"))
        began = await sandbox.start("agent", command, deadline_s=60)
        if word == "started":
            assert not began
        assert await sandbox.wait("agent") == ProcessEnd(6 if began else 5, "exited")
        assert await sandbox.read_file("count", 99) == b"x\n"
    for ref, _ in owned:
        await (await backend.open(ref)).destroy()
    # A container that the engine was making just then is listed as soon as it is there.
    give_up_s = time.monotonic() + 20
    while time.monotonic() < give_up_s and (left := await backend.list_owned()):
        for ref, _ in left:
            await (await backend.open(ref)).destroy()
    assert await backend.list_owned() == []
