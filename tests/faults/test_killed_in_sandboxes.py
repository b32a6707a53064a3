"""INIT, RUN and EVAL killed with -9 at each step while agents are in jails and containers: no agent starts twice, every
rollout completes in its first attempt, and no sandbox is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import docker_engine
import images
import pytest
from msgspec import structs
from yard import STAGES, Yard, config_for, yard

from rollyard.pipeline.config import Config, RelayConfig
from rollyard.pipeline.log import read_rollout
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, HookSpec, Task
from rollyard.stages.sandbox import open_backend
from rollyard.stages.sandboxes import jail_setup
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID
from rollyard.stages.worker import backend_settings, installation

STEPS = {
    "init": ("received", "made", "prepared", "before_state", "after_state", "after_effects", "after_publish"),
    "run": ("received", "prepared", "agent_started", "agent_ended", "collected", "before_state", "after_publish"),
    "eval": ("received", "sandbox_ready", "judged", "before_state", "after_state", "after_publish"),
}
FRESH = "sandbox_ready"
"""The step at which EVAL has a fresh sandbox: its task is judged by a rule that runs there."""
KILLED_IN_A_ROW = 3
SWEPT_WITHIN_S = 60.0
"""After the rest is delivered: half a minute of grace, a sweep every quarter, and what removing takes."""
SCRIPT = "echo begun >> ledger; sleep 1; wc -l < ledger"


def settings_of(backend: str, folder: Path) -> dict[str, Any]:
    """Settings of a backend with a small image of this machine's own files; skips, in CI fails, where there is none."""
    lack = images.missing()
    if backend == "docker":
        docker_engine.require()
        return {"image": docker_engine.root_image(), "pull": False}
    try:
        jail_setup.find_tools()
    except SandboxError as error:
        lack = lack or str(error)
    if lack:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lack)
    return {"images": str(folder / "images")}


def evaluation_of(step: str) -> EvaluationSpec:
    if step == FRESH:
        # The agent's own files and the setup's are there, once each.
        judged = 'echo judged >> ledger; test "$(cat ledger setup)" = "$(printf \'begun\\njudged\\nready\')"'
        return EvaluationSpec(rule="command", args={"command": judged})
    return EvaluationSpec(rule="exact", args={"answer": "1"})


def task_of(backend: str, role: str, step: str) -> Task:
    image = str(images.root_tree(DEFAULT_UID if os.getuid() == 0 else None)) if backend == "bubblewrap" else ""
    return Task(
        id=f"{role}-{step}",
        prompt="p",
        agent=AgentSpec(harness="command", args={"command": ["sh", "-c", SCRIPT]}),
        sandbox=SandboxSpec(backend=backend, image=image, network="none", setup=("echo ready > setup",)),
        evaluation=evaluation_of(step),
        hooks=(HookSpec(hook="wall_clock", args={"limit_s": 300}),),
        outputs=("ledger", "setup"),
    )


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
async def test_killed_at_each_step(backend: str, tmp_path: Path) -> None:
    config = structs.replace(
        config_for(tmp_path, slots=3, backends=(backend,)),
        backends={backend: settings_of(backend, tmp_path)},
        relay=RelayConfig(start=False),
    )
    async with yard(tmp_path, ("gateway", "controller", *STAGES), config=config) as running:
        try:
            for role, steps in STEPS.items():
                await kill_at_each(running, backend, role, steps)
            for role, steps in STEPS.items():
                for step in steps:
                    await check_once(running, role, f"{role}-{step}")
            await check_nothing_is_left(backend, config)
        finally:
            await remove_all(backend, config)


async def kill_at_each(running: Yard, backend: str, role: str, steps: tuple[str, ...]) -> None:
    await running.kill(role)
    for number, step in enumerate(steps):
        if number and number % KILLED_IN_A_ROW == 0:
            running.again(role)
            await running.wait_delivered(role, number)
            await running.kill(role)
        await running.submit(role, [task_of(backend, role, step)])
        running.again_until(role, f"{role}.{step}")
        assert await running.ended(role) == -signal.SIGKILL, step
    running.again(role)
    await running.wait_delivered(role, len(steps))


async def check_once(running: Yard, run: str, name: str) -> None:
    """One attempt, whose agent found that it was the only one."""
    rollout = Rollout.of(run, name, 0, 1)
    logged = await read_rollout(running.bus, run, rollout.rollout_id, kinds=("life",))
    events = [event for _, event in logged if isinstance(event, RolloutEvent)]
    assert {event.attempt for event in events} == {1}, [str(event.failure) for event in events if event.failure]
    assert events[-1].reward == 1.0
    ran = [event for event in events if event.kind == "ran"]
    assert running.bus.blobs is not None
    for event in ran:
        assert event.result is not None
        kept = {each.name: running.bus.blobs.get(each.blob) for each in event.result.artifacts}
        assert (kept["ledger"], kept["setup"]) == (b"begun\n", b"ready\n")


async def owned(backend: str, config: Config) -> list[Any]:
    async with open_backend(backend, with_installation(backend, config)) as opened:
        return [ref for ref, _ in await opened.list_owned()]


def with_installation(backend: str, config: Config) -> dict[str, Any]:
    return backend_settings(config, backend) | {"installation": installation(config.secret({}))}


async def check_nothing_is_left(backend: str, config: Config) -> None:
    until = time.monotonic() + SWEPT_WITHIN_S
    while left := await owned(backend, config):
        assert time.monotonic() < until, left
        await asyncio.sleep(1)


async def remove_all(backend: str, config: Config) -> None:
    async with open_backend(backend, with_installation(backend, config)) as opened:
        for ref, _ in await opened.list_owned():
            await (await opened.open(ref)).destroy()
