"""Behaviours: the persistent shell goes on, whatever a command does to it."""

from __future__ import annotations

import asyncio
from typing import Final

from rollyard.stages.conformance.behaviour import Group, flag
from rollyard.stages.conformance.bench import Bench, expect, nap, on_this_machine, same
from rollyard.stages.shell import Shell

shells: Final = Group("shell")


async def _said(shell: Shell, command: str) -> str:
    result = await shell.run(command, timeout_s=30)
    expect(not result.restarted and not result.timed_out, f"{command[:60]!r} ended the shell: {result}")
    return result.output.decode(errors="replace")


@shells()
async def keeps(bench: Bench) -> None:
    """Directory, variables and functions stay from one command to the next, and exit codes are told"""
    folder = bench.name()
    async with await bench.sandbox.shell(env={"GIVEN": "1"}) as shell:
        await _said(shell, f"mkdir {folder}; cd {folder}; export A='a b'; f() {{ echo \"f$GIVEN\"; }}")
        same(
            await _said(shell, 'pwd -P; echo "$A"; f; echo err >&2'),
            f"{bench.sandbox.workdir}/{folder}\na b\nf1\nerr\n",
            "said",
        )
        same((await shell.run("(exit 42)", timeout_s=30)).exit_code, 42, "exit code")
    async with await bench.sandbox.shell(cwd=folder) as shell:
        same(await _said(shell, "pwd -P"), f"{bench.sandbox.workdir}/{folder}\n", "cwd")


@shells()
async def errors(bench: Bench) -> None:
    """Commands that do not parse, and open quotes and here-documents, are errors and nothing more"""
    async with await bench.sandbox.shell() as shell:
        for command in ("if", "echo 'open", 'echo "open', ")", "cat <<END\nopen"):
            result = await shell.run(command, timeout_s=30)
            expect(not result.restarted and not result.timed_out, f"{command!r} ended the shell: {result}")
            same(await _said(shell, "printf next"), "next", f"after {command!r}")


@shells()
async def restart(bench: Bench) -> None:
    """After `exit`, or a kill, the next command runs in a new shell with the same directory and exported variables"""
    async with await bench.sandbox.shell() as shell:
        for command, code in (("cd /tmp; export A='x y'; exit 3", 3), ("kill -9 $$", 137), ("exec sh -c 'exit 4'", 4)):
            result = await shell.run(command, timeout_s=30)
            same((result.exit_code, result.restarted), (code, True), f"{command!r}")
            same(await _said(shell, 'pwd; echo "$A"'), "/tmp\nx y\n", f"after {command!r}")


@shells()
async def megabyte(bench: Bench) -> None:
    """1 MB of output arrives whole, 100 MB its end; every byte is kept"""
    async with await bench.sandbox.shell() as shell:
        result = await shell.run("seq 150000", timeout_s=60, max_output_bytes=2_000_000)
        expect(result.output == b"".join(b"%d\n" % n for n in range(1, 150_001)), "1 MB differs")
        result = await shell.run("head -c 100000000 /dev/zero; printf END", timeout_s=60, max_output_bytes=9)
        same((result.output, result.truncated), (bytes(6) + b"END", True), "the end of 100 MB")
        printed = "".join(f"\\{byte:03o}" for byte in range(256))
        same((await shell.run(f"printf '{printed}'", timeout_s=30)).output, bytes(range(256)), "bytes")


@shells()
async def long_command(bench: Bench) -> None:
    """A command of 200 KB runs"""
    async with await bench.sandbox.shell() as shell:
        result = await shell.run(f"printf %s '{'y' * 200_000}' | wc -c", timeout_s=60)
        same(result.output.strip(), b"200000", "length")


@shells()
async def input_is_empty(bench: Bench) -> None:
    """Commands that read get nothing, and nothing of what comes next"""
    async with await bench.sandbox.shell() as shell:
        same(await _said(shell, 'cat; read x; echo "[$x]"'), "[]\n", "said")


@shells()
async def interrupted(bench: Bench) -> None:
    """At its time limit a command is interrupted or the shell made anew; what it ran is gone, what was told is kept"""
    seconds = nap()
    async with await bench.sandbox.shell() as shell:
        await _said(shell, "cd /tmp; export A=1")
        for command in (f"sleep {seconds}", f"trap '' INT; setsid sleep {seconds}; sleep {seconds}"):
            result = await shell.run(f"echo begun; {command}", timeout_s=1)
            expect(result.timed_out and result.exit_code is None, f"it is not called too late: {result}")
            expect(result.output.startswith(b"begun\n"), f"its output is lost: {result}")
            same(await _said(shell, "pwd; echo $A"), "/tmp\n1\n", "after it")
    await _none_runs(seconds)


@shells()
async def background(bench: Bench) -> None:
    """Background jobs that write disturb no exit code, and end with the shell"""
    seconds = nap()
    async with await bench.sandbox.shell() as shell:
        await _said(shell, f"(while :; do echo tick; sleep 0.01; done) & setsid sleep {seconds} & sleep 0.1")
        for number in range(20):
            result = await shell.run(f"echo now; (exit {number})", timeout_s=30)
            same((result.exit_code, result.output.replace(b"tick\n", b"")), (number, b"now\n"), "result")
    await _none_runs(seconds)


async def _none_runs(seconds: str) -> None:
    for _ in range(60):
        if not on_this_machine(f"sleep\0{seconds}"):
            return
        await asyncio.sleep(0.05)
    expect(False, "what the shell started still runs after it was closed")


@shells(flag("tty", "it has no pseudo-terminals"))
async def terminal(bench: Bench) -> None:
    """On request there is a terminal, without echo and without changed line ends"""
    async with await bench.sandbox.shell(tty=True) as shell:
        same(await _said(shell, "test -t 1 && echo terminal; printf 'a\\nb\\n'"), "terminal\na\nb\n", "said")
        result = await shell.run("sleep 1000", timeout_s=0.5)
        expect(result.timed_out, "the command was not interrupted")
        same(await _said(shell, "echo next"), "next\n", "after it")
    async with await bench.sandbox.shell() as shell:
        same(await _said(shell, "test -t 1 || echo none"), "none\n", "without request")


@shells(flag("users", "it has one user only"))
async def user(bench: Bench) -> None:
    """It runs as the user that is asked for"""
    async with await bench.sandbox.shell(user="65534") as shell:
        same(await _said(shell, "id -u"), "65534\n", "user id")
