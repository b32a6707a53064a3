"""Each process killed with -9 between any two steps of what it does, one step after the other in a single run."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import outcome
import pytest
import pytest_asyncio
import world
from yard import Yard, config_for, yard

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("init", "run", "eval", "aggregate")
HAND_OVER = ("received", "before_state", "after_state", "after_effects", "after_publish")
OF_ITS_OWN = {
    "init": ("made", "prepared"),
    "run": ("prepared", "agent_started", "agent_ended", "collected"),
    "eval": ("sandbox_ready", "judged"),
    "aggregate": ("committing", "committed", "delivered", "group_checked"),
    "admit": ("received", "after_state", "fanned_out", "before_ack"),
    "sink": ("collected", "written", "marker_written", "marked", "renamed", "cleaned"),
    "gateway": ("before_intent", "intent_logged", "before_end", "end_logged"),
}
STEPS = {
    role: [f"{role}.{step}" for step in (*(HAND_OVER if role in STAGES else ()), *own)]
    for role, own in OF_ITS_OWN.items()
}
COMMANDS = ("archive", "sweep")
"""Killed at every step in tests/pipeline/test_archive*.py and test_sweep.py."""
GROUP_SIZE = 4
# On a slow machine one message may be in the hands of every process that is killed; the sixth try gives it up.
KILLED_IN_A_ROW = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Yard]:
    folder = tmp_path_factory.mktemp("yard")
    # Few messages are in the hands of a process at a time, so that its next life finds fresh ones at once.
    async with yard(folder, config=config_for(folder, slots=3)) as started:
        yield started


def test_every_step_in_the_code_is_here() -> None:
    found: set[str] = set()
    for folder in ("pipeline", "stages", "gateway"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r'checkpoint\(f?"([^"]+)"\)', path.read_text()):
                of_any_stage, _, step = name.rpartition("}")
                found |= {f"{stage}{step}" for stage in STAGES} if of_any_stage else {name}
    by_commands = {step for step in found if step.partition(".")[0] in COMMANDS}
    assert by_commands, "the commands that archive and sweep have no steps any more"
    assert found - by_commands == {step for steps in STEPS.values() for step in steps}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", STEPS)
async def test_killed_at_every_step(running: Yard, role: str) -> None:
    words = ("", world.STREAMING) if role == "gateway" else ("",)
    rollouts = GROUP_SIZE * len(STEPS[role])
    tasks = world.make_tasks(rollouts, ledger=running.ledger, group_size=GROUP_SIZE, words=words)
    if role == "eval":
        tasks = world.judged_afresh(tasks)
    await running.kill(role)
    for number, (step, task) in enumerate(zip(STEPS[role], tasks, strict=True)):
        if number and number % KILLED_IN_A_ROW == 0:
            running.again(role)
            await running.wait_delivered(role, number * GROUP_SIZE)
            await running.kill(role)
        await running.submit(role, [task])
        running.again_until(role, step)
        assert await running.ended(role) == -signal.SIGKILL, step
    running.again(role)
    await outcome.check(running, role, tasks, swept=False)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sweeper_removes_what_a_dead_init_has_left(running: Yard) -> None:
    """INIT died above between making a sandbox and saying so. The sweeper gives such a sandbox half a minute."""
    await outcome.check_no_sandbox_is_left(running.config.sandboxes_dir(), running)
