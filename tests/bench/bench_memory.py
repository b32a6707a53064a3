"""Memory of each process while 100,000 tasks wait.

python tests/bench/bench_memory.py [--tasks 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import uvloop
from measure import rss_mib, table
from msgspec import structs
from roles import Yard, yard

from rollyard.pipeline.codec import encode
from rollyard.pipeline.config import AdmitConfig
from rollyard.schemas import subjects
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task

AT_A_TIME = 200


async def publish(running: Yard, tasks: int) -> None:
    """Queue tasks of about half a kilobyte."""
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> None:
        async with slots:
            task = Task(
                id=f"t{number}",
                prompt=f"task {number}: " + "think about it " * 30,
                agent=AgentSpec(harness="noop", args={"sleep_s": 3600}),
                sandbox=SandboxSpec(backend="none"),
            )
            await running.bus.publish(subjects.task_subject("memory"), encode(task))

    for first in range(0, tasks, 5000):
        async with asyncio.TaskGroup() as group:
            for number in range(first, min(first + 5000, tasks)):
                group.create_task(one(number))


def memory(running: Yard) -> dict[str, float]:
    """Resident memory of every process."""
    return {"nats-server": rss_mib(running.nats.pid)} | {
        name: rss_mib(child.pid) for name, child in running.children.items()
    }


async def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        async with yard(Path(name), admit=structs.replace(AdmitConfig(), window=1024)) as running:
            await running.start_workers()
            await running.start("controller", "controller")
            await running.start("sink", "sink")
            await asyncio.sleep(3)
            empty = memory(running)
            await publish(running, arguments.tasks)
            await asyncio.sleep(10)
            full = memory(running)
            info = await running.bus.stream_info(subjects.TASKS)
            waiting = info["state"]["messages"]
    rows = [[name, empty[name], full[name], full[name] - empty[name]] for name in full]
    print(table(["process", "MiB idle", f"MiB with {waiting} tasks waiting", "more"], rows))


if __name__ == "__main__":
    uvloop.run(main())
