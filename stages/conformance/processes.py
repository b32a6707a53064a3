"""Behaviours: a detached process is started once, outlives whoever started it, and ends whole."""

from __future__ import annotations

import asyncio
from typing import Final

from rollyard.harnesses.harness import Command
from rollyard.stages.conformance.behaviour import Group
from rollyard.stages.conformance.bench import BEAT, Bench, beats, expect, same, script_command, silent
from rollyard.stages.conformance.other_process import elsewhere
from rollyard.stages.sandbox import ProcessEnd

processes: Final = Group("processes")

DEADLINE_S: Final = 60.0


@processes()
async def ending(bench: Bench) -> None:
    """It gets argv, environment and input; its end, exit code and output are told, as often as asked"""
    name, sandbox = bench.name(), bench.sandbox
    command = Command(("sh", "-c", 'cat; echo "$A" >&2; exit 7'), {"A": "a b"}, stdin=b"in\0put")
    expect(await sandbox.start(name, command, deadline_s=DEADLINE_S), "the first start is called the second")
    for _ in range(2):
        same(await sandbox.wait(name), ProcessEnd(7, "exited"), "end")
    same(await sandbox.output(name, 100), (b"in\0put", b"a b\n"), "output")
    same(await (await bench.backend.open(sandbox.ref)).wait(name), ProcessEnd(7, "exited"), "end seen by another")


@processes()
async def started_once(bench: Bench) -> None:
    """Starting it twice starts it once"""
    name, sandbox = bench.name(), bench.sandbox
    command = script_command(f"echo x >>{name}")
    expect(await sandbox.start(name, command, deadline_s=DEADLINE_S), "the first start is called the second")
    expect(not await sandbox.start(name, command, deadline_s=DEADLINE_S), "the second start is called the first")
    await sandbox.wait(name)
    expect(not await sandbox.start(name, command, deadline_s=DEADLINE_S), "a start after its end is called the first")
    same(await sandbox.read_file(name, 100), b"x\n", "what it wrote")


@processes()
async def race(bench: Bench) -> None:
    """Of several who start it at a time one does"""
    name = bench.name()
    handles = [await bench.backend.open(bench.sandbox.ref) for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        command = script_command(f"echo x >>{name}")
        starts = [group.create_task(handle.start(name, command, deadline_s=DEADLINE_S)) for handle in handles]
    same(sorted(start.result() for start in starts), [False, False, False, True], "who started it")
    await bench.sandbox.wait(name)
    same(await bench.sandbox.read_file(name, 100), b"x\n", "what it wrote")


@processes()
async def another_worker(bench: Bench) -> None:
    """Another process of this machine opens the sandbox by its reference, waits for the agent and reads its files"""
    name, sandbox = bench.name(), bench.sandbox
    await sandbox.start(name, script_command(f"sleep 1; echo out; echo file >{name}; exit 5"), deadline_s=DEADLINE_S)
    told = await elsewhere(bench.setting, sandbox.ref, "wait", name)
    same(told, {"end": [5, "exited"], "stdout": "out\n", "file": "file\n"}, "what it saw")
    same(await sandbox.wait(name), ProcessEnd(5, "exited"), "end seen here")


@processes()
async def worker_death(bench: Bench) -> None:
    """An agent lives through the death (kill -9) of the worker that started it"""
    name, sandbox = bench.name(), bench.sandbox
    script = f"echo $$ >>{name}; sleep 2; echo alive; exit 3"
    await elsewhere(bench.setting, sandbox.ref, "start", name, script)
    same(await sandbox.wait(name), ProcessEnd(3, "exited"), "end")
    same((await sandbox.output(name, 100))[0], b"alive\n", "output")
    same((await sandbox.read_file(name, 100) or b"").count(b"\n"), 1, "starts")


@processes()
async def output_so_far(bench: Bench) -> None:
    """Its output can be read while it runs, the end of it if it is long"""
    name, sandbox = bench.name(), bench.sandbox
    await sandbox.start(name, script_command("echo first; echo last; sleep 1000"), deadline_s=DEADLINE_S)
    async with asyncio.timeout(20):
        while (await sandbox.output(name, 5))[0] != b"last\n":  # noqa: ASYNC110 - it happens elsewhere
            await asyncio.sleep(0.05)
    await sandbox.kill(name)


@processes()
async def kill(bench: Bench) -> None:
    """Killing it kills all that it started, also what left its session, and says so"""
    name, beat, sandbox = bench.name(), bench.name(), bench.sandbox
    script = f"setsid sh -c '({BEAT.format(beat)}) & exec sleep 1000' & sleep 1000"
    await sandbox.start(name, script_command(script), deadline_s=DEADLINE_S)
    await beats(sandbox, beat)
    await sandbox.kill(name)
    same((await sandbox.wait(name)).reason, "killed", "reason")
    await silent(sandbox, beat, "a grandchild in a session of its own")
    await sandbox.kill(name)
    await sandbox.kill(bench.name())


@processes()
async def daemon(bench: Bench) -> None:
    """When it ends by itself, what it started is ended too"""
    name, beat, sandbox = bench.name(), bench.name(), bench.sandbox
    script = f"setsid sh -c '{BEAT.format(beat)}' & while ! test -s {beat}; do sleep 0.05; done"
    await sandbox.start(name, script_command(script), deadline_s=DEADLINE_S)
    same(await sandbox.wait(name), ProcessEnd(0, "exited"), "end")
    await silent(sandbox, beat, "what it started")


@processes()
async def deadline(bench: Bench) -> None:
    """At its deadline it ends, though it ignores signals, and so does all that it started"""
    name, beat, sandbox = bench.name(), bench.name(), bench.sandbox
    script = f"trap '' TERM INT HUP; setsid sh -c '{BEAT.format(beat)}' & while :; do sleep 1000; done"
    await sandbox.start(name, script_command(script), deadline_s=1.0)
    same((await sandbox.wait(name)).reason, "deadline", "reason")
    await silent(sandbox, beat, "what it started")


@processes()
async def kills_its_parent(bench: Bench) -> None:
    """An agent that kills its parent has an end all the same, and leaves nothing running"""
    name, beat, sandbox = bench.name(), bench.name(), bench.sandbox
    script = f"(setsid sh -c '{BEAT.format(beat)}' &); sleep 0.3; kill -9 $PPID; sleep 0.3"
    await sandbox.start(name, script_command(script), deadline_s=5.0)
    async with asyncio.timeout(30):
        await sandbox.wait(name)
    await silent(sandbox, beat, "what it started")
