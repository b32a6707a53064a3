"""Processes of peers: pinned to a core of their own, ended with all their children, and what they use. Linux only."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from measure import cpu_s, rss_mib

READY_TIMEOUT_S: Final = 90.0
OURS: Final = min(os.sched_getaffinity(0))
"""The core of client, stub and nats-server."""
THEIRS: Final = max(os.sched_getaffinity(0))
"""The core of the peers."""


def pin() -> None:
    """Keep this process, and what it starts, on one core."""
    os.sched_setaffinity(0, {OURS})


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def tree_cpu_s(pids: Iterable[int]) -> float:
    """Processor seconds of process trees so far, user and system."""
    total = 0.0
    for pid in pids:
        for each in tree(pid):
            with suppress(OSError):
                total += cpu_s(each)
    return total


def tree_rss_mib(pids: Iterable[int]) -> float:
    """Resident memory of process trees in MiB."""
    return sum(rss_mib(each) for pid in pids for each in tree(pid))


def peak_rss_mib(pids: Iterable[int]) -> float:
    """The highest resident memory of processes so far, in MiB, without their children."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


@asynccontextmanager
async def started(
    command: list[str], log: Path, port: int, *, core: int = THEIRS, env: Mapping[str, str] | None = None
) -> AsyncIterator[int]:
    """Run a process until the block ends; gives its pid once it listens on `port`. Raises RuntimeError."""
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *("taskset", "-c", str(core), *command),
            stdout=sink,
            stderr=sink,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    try:
        await _listens(process, port, log)
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                await process.wait()
        # The session is its own: nothing of it is left behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _listens(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process.returncode is None and time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        await writer.wait_closed()
        return
    tail = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise RuntimeError(f"{log.stem} did not start: {' | '.join(tail)}; its log is {log}")
