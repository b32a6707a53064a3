"""How RUN grows with workers: rollouts that sleep two seconds, with 1, 2 and 4 run workers of 16 slots each.

python tests/bench/bench_scaling.py [--rollouts-per-worker 64]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import uvloop
from measure import table
from roles import ROLES, Yard, delivered_at_least, yard

from rollyard.pipeline.codec import encode
from rollyard.schemas import subjects
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task

SLEEP_S = 2.0
SLOTS = 16


async def measure(running: Yard, rollouts: int, run: str) -> float:
    """Rollouts a second, from the first publish to the last delivery."""
    start, before = await running.delivered(), time.perf_counter()
    task = Task(
        id="sleep",
        prompt="sleep",
        group_size=rollouts,
        agent=AgentSpec(harness="noop", args={"sleep_s": SLEEP_S}),
        sandbox=SandboxSpec(backend="none"),
    )
    await running.bus.publish(subjects.task_subject(run), encode(task))
    await delivered_at_least(running, start + rollouts + 1)
    return rollouts / (time.perf_counter() - before)


async def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts-per-worker", type=int, default=64)
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    for workers in (1, 2, 4):
        with tempfile.TemporaryDirectory() as name:
            async with yard(Path(name)) as running:
                await running.start_workers([role for role in ROLES if role != "run"])
                for number in range(workers):
                    await running.start(f"run{number}", "worker", "--stages", "run", "--slots", str(SLOTS))
                await measure(running, SLOTS * workers, "warm-up")
                rate = await measure(running, arguments.rollouts_per_worker * workers, "measured")
        ideal = workers * SLOTS / SLEEP_S
        first = rows[0][1] if rows else rate
        assert isinstance(first, float)
        rows.append([workers, rate, ideal, rate / ideal, rate / first])
    print(table(["run workers", "rollouts/s", "ideal", "share of ideal", "times one worker"], rows))


if __name__ == "__main__":
    uvloop.run(main())
