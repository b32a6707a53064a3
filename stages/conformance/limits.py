"""Behaviours: limits hold, and a sandbox that reached one goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from rollyard.schemas.sandbox import Limits
from rollyard.stages.conformance.behaviour import Group, flag, limit
from rollyard.stages.conformance.bench import Bench, expect, nap, run, said, same, script_command

limits: Final = Group("limits")

MIB: Final = 1 << 20
_HOG: Final = "exec dd if=/dev/zero of=/dev/null bs=300M count=1000 2>/dev/null"
"""Uses 300 MB for seconds: a limit that somebody keeps by looking is noticed too."""


@limits(limit("memory_bytes"))
async def memory(bench: Bench) -> None:
    """A process that uses more memory than the limit ends, with `memory` as reason, and the sandbox goes on"""
    name = bench.name()
    async with bench.fresh(limits=Limits(memory_bytes=96 * MIB)) as sandbox:
        await sandbox.start(name, script_command(_HOG), deadline_s=40)
        end = await sandbox.wait(name)
        same(end.reason, "memory", "reason")
        same(await said(sandbox, "echo next"), "next\n", "the next command")


@limits(limit("max_processes"))
async def processes(bench: Bench) -> None:
    """A fork bomb gets no more processes than the limit; after it the sandbox goes on"""
    async with bench.fresh(limits=Limits(max_processes=48)) as sandbox:
        bomb = "n=0; while [ $n -lt 300 ]; do sleep 3 & n=$((n + 1)); done; echo all 300"
        result = await sandbox.exec(f"({bomb}) 2>/dev/null; wait", timeout_s=30)
        expect(b"all 300" not in result.stdout, "300 processes were started")
        same(
            await said(sandbox, "for n in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo next"),
            "next\n",
            "the next command",
        )


@limits(limit("disk_bytes"))
async def disk(bench: Bench) -> None:
    """Files take no more room than the limit, in the working directory as in /tmp; what is removed makes room again"""
    # Some can limit only what the working directory, the home and /tmp hold.
    async with bench.fresh(limits=Limits(disk_bytes=32 * MIB), read_only=bench.capabilities.read_only) as sandbox:
        result = await run(sandbox, "dd if=/dev/zero of=big bs=1M count=64; s=$?; wc -c <big; exit $s")
        expect(result.exit_code != 0, "64 MB were written")
        expect(int(result.stdout) <= 33 * MIB, f"{int(result.stdout)} bytes were written")
        await said(sandbox, "rm big && head -c 1000000 /dev/zero >small && rm small")
        result = await run(sandbox, "dd if=/dev/zero of=/tmp/big bs=1M count=64 2>/dev/null; wc -c </tmp/big")
        expect(int(result.stdout) <= 33 * MIB, f"{int(result.stdout)} bytes were written to /tmp")


@limits(limit("max_file_bytes"))
async def file_size(bench: Bench) -> None:
    """One file gets no larger than the limit"""
    async with bench.fresh(limits=Limits(max_file_bytes=MIB)) as sandbox:
        result = await run(sandbox, "(dd if=/dev/zero of=big bs=64k count=64 2>/dev/null); wc -c <big")
        expect(0 < int(result.stdout) <= MIB, f"it has {int(result.stdout)} bytes")
        await said(sandbox, "head -c 1000000 /dev/zero >small")


@limits(flag("read_only", "it cannot make its files read-only"))
async def read_only(bench: Bench) -> None:
    """A read-only sandbox can be written in its working directory, its home and /tmp, and nowhere else"""
    async with bench.fresh(read_only=True) as sandbox:
        await said(sandbox, 'echo x >here && echo x >"$HOME/here" && echo x >/tmp/here')
        await sandbox.put_files({"put": "x"})
        for path in ("/check", "/usr/check", "/etc/check"):
            result = await run(sandbox, f"echo x >{path}")
            expect(result.exit_code != 0, f"{path} was written")


@limits(flag("isolated", "it isolates nothing"))
async def isolated(bench: Bench) -> None:
    """An agent sees none of this machine's processes, can kill none, and has no capabilities over it"""
    sandbox, seconds = bench.sandbox, nap()
    child = await asyncio.create_subprocess_exec("sleep", seconds)
    try:
        seen = await run(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null")
        expect(seconds.encode() not in seen.stdout, "it sees a process of this machine")
        await run(sandbox, f"kill -9 {child.pid}")
        await asyncio.sleep(0.1)
        expect(child.returncode is None, "it killed a process of this machine")
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    held = await said(sandbox, "grep CapEff /proc/self/status")
    same(int(held.split()[1], 16) & ~_HARMLESS, 0, "capabilities that are not harmless")


# What Docker leaves to root by default within its own container is not of the machine: chown, dac_override, fowner,
# fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, setfcap.
_HARMLESS: Final = 0x80_04_05_FB
