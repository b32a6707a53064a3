from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json, structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.progress import RunStatus, render_status, run_status
from rollyard.schemas import subjects
from rollyard.schemas.failure import Status
from rollyard.schemas.fleet import PolicyVersion
from rollyard.schemas.rollout import Rollout, RolloutState
from rollyard.schemas.task import TaskProgress

BUSY = RunStatus(
    run="demo",
    at_ms=1,
    tasks=30,
    tasks_closed=14,
    rollouts=240,
    stages={"init": 0, "run": 12, "eval": 1, "aggregate": 0},
    delivered=120,
    groups=14,
    ended={"completed": 110, "truncated": 4, "failed": 6},
)
EARLIER = structs.replace(BUSY, delivered=100)


def test_a_plain_line_says_everything_once() -> None:
    status = structs.replace(BUSY, dead=1, tokens=5000)
    line = render_status(status, structs.replace(EARLIER, tokens=1000), 10.0, None)
    assert line == (
        "demo: 120/240 rollouts, 14/30 groups; init 0, run 12, eval 1, aggregate 0; "
        "2.0 rollouts/s, 400 tokens/s, 1:00 left; 110 completed, 6 failed, 4 truncated, 1 in DEAD"
    )


def test_a_block_for_a_terminal() -> None:
    assert render_status(BUSY, EARLIER, 10.0, 60).splitlines() == [
        "demo  120/240 rollouts  14/30 groups",
        f"[{'#' * 20}{'.' * 20}]  50%",
        "init 0  run 12  eval 1  aggregate 0",
        "2.0 rollouts/s  1:00 left",
        "110 completed  6 failed  4 truncated",
    ]


@pytest.mark.parametrize(
    ("status", "previous", "words"),
    [
        (BUSY, None, "time left not known"),
        (BUSY, BUSY, "0.0 rollouts/s, time left not known"),
        (structs.replace(BUSY, delivered=240), BUSY, "all delivered"),
        (structs.replace(BUSY, delivered=240, tasks_waiting=5), EARLIER, "240/240+ rollouts"),
        (structs.replace(BUSY, tasks_waiting=5), EARLIER, "admit 5, init 0"),
        (RunStatus(run="demo", at_ms=0), None, "nothing to do yet"),
        (structs.replace(BUSY, rollouts=100_000), EARLIER, "13:52:20 left"),
    ],
)
def test_what_a_line_says_in_each_case(status: RunStatus, previous: RunStatus | None, words: str) -> None:
    assert words in render_status(status, previous, 10.0, None)


counts = st.integers(0, 10**6)


@given(counts, counts, counts, st.floats(0, 1e6), st.none() | st.integers(0, 200))
def test_no_numbers_break_the_rendering(
    delivered: int, rollouts: int, before: int, elapsed_s: float, width: int | None
) -> None:
    status = structs.replace(BUSY, delivered=delivered, rollouts=rollouts)
    text = render_status(status, structs.replace(BUSY, delivered=before), elapsed_s, width)
    if width is None:
        assert "\n" not in text
    else:
        assert all(len(line) <= width for line in text.split("\n"))


async def test_a_snapshot_counts_this_run_only(bus: Bus) -> None:
    statuses: list[Status | None] = ["completed", "completed", "failed", None]
    for run in ("my run", "other"):
        await _put_rollouts(bus, run, statuses)
        await bus.publish(subjects.stage_subject("init", "local", run), b"x")
        await bus.publish(subjects.stage_subject("run", "here", run), b"x")
        await bus.publish(subjects.stage_subject("run", "there", run), b"x")
        await bus.publish(subjects.stage_subject("aggregate", None, run), b"x")
        await bus.publish(subjects.task_subject(run), b"x")
        await bus.publish(subjects.dead_subject("admit", run), b"x")
        await bus.publish(subjects.group_subject(run, "t"), b"x")
        for index in range(3):
            await bus.publish(subjects.sample_subject(run, "t", index), b"x")
        policy = PolicyVersion(run=run, version=7)
        await Bucket[PolicyVersion](bus, subjects.POLICY, PolicyVersion).put(subjects.token(run), policy)
    status = await run_status(bus, "my run")
    assert structs.replace(status, at_ms=0) == RunStatus(
        run="my run",
        at_ms=0,
        tasks=2,
        tasks_waiting=1,
        tasks_closed=1,
        rollouts=6,
        stages={"init": 1, "run": 2, "eval": 0, "aggregate": 1},
        delivered=3,
        groups=1,
        ended={"completed": 2, "failed": 1},
        dead=1,
        no_worker={"local": 1},
        policy_version=7,
        model_servers=0,
    )
    assert json.decode(json.encode(status), type=RunStatus) == status
    assert (await run_status(bus, "my run", statuses=False)).ended is None


async def _put_rollouts(bus: Bus, run: str, statuses: list[Status | None]) -> None:
    tasks = Bucket[TaskProgress](bus, subjects.TASK_BUCKET, TaskProgress)
    for task, size, progress in (("t", 4, "fanned_out"), ("u", 2, "closed")):
        value = TaskProgress(content_hash="x", group_size=size, progress=progress, task_id=task, run=run)
        await tasks.put(subjects.task_key(run, task), value)
        await bus.publish(subjects.kv_subject(subjects.TASK_BUCKET, f"{subjects.task_key(run, task)}.body"), b"x")
    rollouts = Bucket[RolloutState](bus, subjects.ROLLOUTS, RolloutState)
    for index, status in enumerate(statuses):
        rollout = Rollout.of(run, "t", index, 4)
        state = RolloutState(rollout=rollout, position="ended" if status else "run", status=status)
        await rollouts.put(subjects.rollout_key(run, rollout.rollout_id), state)


async def test_a_run_that_nobody_knows_is_empty(bus: Bus) -> None:
    status = await run_status(bus, "nothing")
    assert (status.tasks, status.rollouts, status.delivered, status.ended, status.policy_version) == (0, 0, 0, {}, None)
    assert encode(status)
