"""The no-op pipeline against a floor: what does a rollout cost when nothing is done in it?

Rollyard: every role in a process of its own, agents that start no process, one synthetic logged call a rollout. The
floor, in the same run: six publishes and five acknowledged messages a rollout, by hand, with the plain client.

    python tests/bench/bench_noop.py [--rollouts 3000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nats
import uvloop
from measure import cpu_s, table, total_cpu_s
from roles import ROLES, Yard, delivered_at_least, yard

from rollyard.pipeline.codec import encode
from rollyard.schemas import subjects
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task

GROUP_SIZE = 8
FLOOR_PUBLISHES, FLOOR_ACKS = 6, 5


@dataclass
class Round:
    """One measurement; CPU in milliseconds a rollout."""

    rate: float
    client_ms: float
    server_ms: float
    operations: float


async def floor(running: Yard, rollouts: int) -> Round:
    """Six publishes and five ack_syncs a rollout, 64 rollouts at a time, in one process."""
    client = await nats.connect(running.nats.url)
    stream = client.jetstream()
    await stream.add_stream(name="FLOOR", subjects=["floor.>"], retention="workqueue")
    pull = await stream.pull_subscribe("floor.work", durable="floor", stream="FLOOR")
    payload = b"x" * 300
    before = time.perf_counter(), time.process_time(), cpu_s(running.nats.pid), running.operations()
    slots = asyncio.Semaphore(64)

    async def publish() -> None:
        async with slots:
            for number in range(FLOOR_PUBLISHES):
                await stream.publish("floor.work" if number < FLOOR_ACKS else "floor.log", payload)

    async def consume() -> None:
        left = rollouts * FLOOR_ACKS
        while left:
            messages = await pull.fetch(min(64, left), timeout=10)
            await asyncio.gather(*(message.ack_sync(timeout=10) for message in messages))
            left -= len(messages)

    await asyncio.gather(consume(), *(publish() for _ in range(rollouts)))
    outcome = _round(before, running, rollouts, time.process_time() - before[1])
    await client.close()
    await running.bus.api("STREAM.DELETE.FLOOR")
    return outcome


async def rollyard(running: Yard, rollouts: int, run: str) -> Round:
    """The same number of rollouts through every role."""
    start_cpu = total_cpu_s(running.pids())
    start = await running.delivered()
    before = time.perf_counter(), 0.0, cpu_s(running.nats.pid), running.operations()
    for number in range(rollouts // GROUP_SIZE):
        task = Task(
            id=f"t{number}",
            prompt="nothing to do",
            group_size=GROUP_SIZE,
            agent=AgentSpec(harness="noop"),
            sandbox=SandboxSpec(backend="none"),
        )
        await running.bus.publish(subjects.task_subject(run), encode(task))
    await delivered_at_least(running, start + rollouts + rollouts // GROUP_SIZE)
    return _round(before, running, rollouts, total_cpu_s(running.pids()) - start_cpu)


def _round(before: tuple[float, float, float, int], running: Yard, rollouts: int, client_s: float) -> Round:
    return Round(
        rate=rollouts / (time.perf_counter() - before[0]),
        client_ms=client_s / rollouts * 1e3,
        server_ms=(cpu_s(running.nats.pid) - before[2]) / rollouts * 1e3,
        operations=(running.operations() - before[3]) / rollouts,
    )


async def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rollouts = arguments.rollouts // GROUP_SIZE * GROUP_SIZE
    with tempfile.TemporaryDirectory() as name:
        async with yard(Path(name)) as running:
            await running.start_workers(ROLES)
            await rollyard(running, GROUP_SIZE * 16, "warm-up")
            pairs = [
                (await floor(running, rollouts), await rollyard(running, rollouts, f"run{number}"))
                for number in range(arguments.rounds)
            ]
    rows = [_row("floor: 6 publishes, 5 ack_syncs", [pair[0] for pair in pairs])]
    rows.append(_row("Rollyard, one process a role", [pair[1] for pair in pairs]))
    head = ["no-op pipeline", "rollouts/s", "client CPU ms", "server CPU ms", "operations"]
    print(table(head, rows))
    ratio = statistics.median(
        (ours.client_ms + ours.server_ms) / (base.client_ms + base.server_ms) for base, ours in pairs
    )
    print(
        f"\nCPU of Rollyard over CPU of the floor, per rollout: {ratio:.2f} (median of {len(pairs)}; goal: at most 3)"
    )


def _row(name: str, rounds: list[Round]) -> list[object]:
    fields = ("rate", "client_ms", "server_ms", "operations")
    return [name, *(statistics.median(getattr(one, key) for one in rounds) for key in fields)]


if __name__ == "__main__":
    uvloop.run(main())
