"""Behaviours: a short command gives what it said and how it ended, and leaves nothing running."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final

from rollyard.stages.conformance.behaviour import Group, flag
from rollyard.stages.conformance.bench import BEAT, Bench, expect, run, said, same, silent

execs: Final = Group("exec")

FLOOD_BYTES: Final = 50_000_000


@execs()
async def script_and_argv(bench: Bench) -> None:
    """A script is run by sh; the words of an argv arrive as they are"""
    same(await said(bench.sandbox, "x=1; echo $((x + 1)) | cat"), "2\n", "a script")
    words = ("a b", "", "$HOME", "'\"`\\", "é漢", "*", "-n")
    result = await bench.sandbox.exec(("printf", "<%s>\\n", *words), timeout_s=30)
    same(result.stdout.decode(), "".join(f"<{word}>\n" for word in words), "words")


@execs()
async def streams(bench: Bench) -> None:
    """Standard output and standard error are apart, bytes are kept, and the exit code is the program's"""
    result = await run(bench.sandbox, "printf 'out\\0\\377'; printf err >&2; exit 37")
    same((result.exit_code, result.stdout, result.stderr), (37, b"out\0\xff", b"err"), "result")
    expect(not result.truncated and not result.timed_out, "it is called truncated or too late")


@execs()
async def not_found(bench: Bench) -> None:
    """A program that is not there gives exit code 127"""
    same((await bench.sandbox.exec(("no-such-program-here",), timeout_s=30)).exit_code, 127, "exit code")


@execs()
async def signals(bench: Bench) -> None:
    """A program that a signal killed has the negative of its number as exit code"""
    same((await bench.sandbox.exec(("sh", "-c", "kill -9 $$"), timeout_s=30)).exit_code, -9, "exit code")


@execs()
async def directory(bench: Bench) -> None:
    """It starts in the working directory, or where `cwd` says, relative to it or absolute"""
    folder = bench.name()
    await said(bench.sandbox, f"mkdir -p '{folder}/a b'")
    same(await said(bench.sandbox, "pwd -P"), f"{bench.sandbox.workdir}\n", "directory")
    same(
        await said(bench.sandbox, "pwd -P", cwd=f"{folder}/a b"), f"{bench.sandbox.workdir}/{folder}/a b\n", "relative"
    )
    same(await said(bench.sandbox, "pwd -P", cwd="/"), "/\n", "absolute")


@execs()
async def environment(bench: Bench) -> None:
    """Variables arrive as they are, and none of this machine's own"""
    value = "a b'\"$x\n`é`\\"
    os.environ["ROLLYARD_CHECK_SECRET"] = "x"
    try:
        result = await run(bench.sandbox, 'printf %s "$GIVEN"; env >&2', env={"GIVEN": value})
    finally:
        del os.environ["ROLLYARD_CHECK_SECRET"]
    same(result.stdout.decode(), value, "the variable")
    expect(b"ROLLYARD_CHECK_SECRET" not in result.stderr, "it sees the environment of the worker")
    expect(b"\nPATH=" in b"\n" + result.stderr and b"\nHOME=" in b"\n" + result.stderr, "PATH or HOME is missing")


@execs()
async def stdin(bench: Bench) -> None:
    """Standard input arrives as it is; without any it is at its end"""
    given = bytes(range(256)) * 1000
    same((await bench.sandbox.exec(("cat",), stdin=given, timeout_s=30)).stdout, given[-65_536:], "input")
    same((await run(bench.sandbox, "cat")).stdout, b"", "input that was not given")


@execs(flag("users", "it has one user only"))
async def user(bench: Bench) -> None:
    """It runs as the user that is asked for"""
    same(await said(bench.sandbox, "id -u", user="65534"), "65534\n", "user id")


@execs()
async def timeout(bench: Bench) -> None:
    """At its time limit it is ended, and what it said is kept"""
    began = time.monotonic()
    result = await bench.sandbox.exec("trap '' TERM INT; echo said; while :; do sleep 1; done", timeout_s=1)
    took_s = time.monotonic() - began
    expect(result.timed_out, f"it is not called too late: {result}")
    same(result.stdout, b"said\n", "output")
    expect(0.9 <= took_s < 15, f"it took {took_s:.1f} s instead of 1 s")


@execs()
async def timeout_tree(bench: Bench) -> None:
    """The time limit ends grandchildren in sessions of their own too"""
    beat = bench.name()
    script = "setsid sh -c '(" + BEAT.format(beat) + ") & sleep 1000' & sleep 1000"
    expect((await bench.sandbox.exec(script, timeout_s=1)).timed_out, "it is not called too late")
    await silent(bench.sandbox, beat, "a grandchild in a session of its own")


@execs()
async def leftovers(bench: Bench) -> None:
    """What it leaves running holds nobody up, and is killed at its end"""
    beat = bench.name()
    script = f"setsid sh -c '{BEAT.format(beat)}' & sleep 1000 & while ! test -s {beat}; do sleep 0.05; done; echo done"
    began = time.monotonic()
    same(await said(bench.sandbox, script), "done\n", "output")
    expect(time.monotonic() - began < 15, "it waited for what it left running")
    await silent(bench.sandbox, beat, "what it left running")


@execs()
async def flood(bench: Bench) -> None:
    """Of 50 MB of output the last bytes are kept"""
    result = await run(
        bench.sandbox, f"head -c {FLOOD_BYTES} /dev/zero; printf END", timeout_s=50, max_output_bytes=1000
    )
    same(result.stdout, bytes(997) + b"END", "output")
    expect(result.truncated, "it is not called truncated")


@execs()
async def long_words(bench: Bench) -> None:
    """A word of 100 KB arrives"""
    result = await bench.sandbox.exec(("sh", "-c", "echo ${#1}", "sh", "x" * 100_000), timeout_s=30)
    same(result.stdout, b"100000\n", "its length")


@execs()
async def parallel(bench: Bench) -> None:
    """Ten at a time do not mix"""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(bench.sandbox, f"sleep 0.0{n}; echo {n}; exit {n}")) for n in range(10)]
    same(
        [(task.result().exit_code, task.result().stdout) for task in tasks],
        [(n, b"%d\n" % n) for n in range(10)],
        "results",
    )
