"""Making a sandbox and filling it as a task says: INIT does it for the agent, EVAL for a fresh one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal

import structlog

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.task import Task
from rollyard.stages.git import hidden
from rollyard.stages.sandbox import Labels, Mount, Plan, Sandbox, SandboxBackend
from rollyard.stages.setup import run_step
from rollyard.stages.stage import StageContext, StageFailed, now_ms

log = structlog.get_logger(__name__)

DEADLINE_SHARE: Final = 2.0
"""The dead-man switch of a sandbox: so many times its stages' limits, and the time that it may wait for them."""

_closing: set[asyncio.Task[None]] = set()


def deadline_s(task: Task, ready_s: float) -> float:
    """After how many seconds a sandbox of this task ends by itself, whatever happened to the workers."""
    limits = task.timeouts
    return DEADLINE_SHARE * (limits.init_s + limits.run_s + limits.eval_s) + ready_s


async def let_go(sandbox: Sandbox) -> None:
    """Close what this process holds open of a sandbox that lives on, or is gone."""
    with suppress(SandboxError):
        await sandbox.close_channels()


async def image_of(context: StageContext, task: Task) -> str:
    """The image of the task's sandbox, built when it says how. Raises StageFailed of class init."""
    spec = task.sandbox
    if spec.build is None:
        return spec.image
    try:
        return await context.builds.image(context.backend(spec.backend), spec.build)
    except SandboxError as error:
        raise StageFailed(Failure.of("init", f"sandbox.build: {error.message}", error.hint)) from error


async def make_sandbox(
    context: StageContext,
    state: RolloutState,
    task: Task,
    role: Literal["agent", "eval"] = "agent",
    mounts: Sequence[Mount] = (),
) -> Sandbox:
    """A new sandbox as the task wants it, empty. Raises SandboxError, StageFailed."""
    spec = task.sandbox
    backend = context.backend(spec.backend)
    network = backend.capabilities.network(spec.network)
    if role == "eval" and network == "gateway":
        network = "none"  # no verifier has a key; a judge is asked by the worker
    plan = Plan(
        image=await image_of(context, task),
        workdir=spec.workdir,
        user=spec.user,
        network=network,
        allow_hosts=spec.allow_hosts,
        read_only=spec.read_only,
        limits=spec.limits,
        mounts=tuple(mounts),
        deadline_s=deadline_s(task, context.config.worker.ready_s),
    )
    labels = Labels(
        run=state.rollout.run,
        rollout_id=state.rollout.rollout_id,
        attempt=state.attempt,
        owner=context.worker,
        created_ms=now_ms(),
        role=role,
    )
    return await _create(backend, labels, plan)


async def _create(backend: SandboxBackend, labels: Labels, plan: Plan) -> Sandbox:
    """Make it. When the caller is cancelled meanwhile, what comes of it is destroyed."""
    creating = asyncio.ensure_future(backend.create(labels, plan))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        closing = asyncio.create_task(_destroy_when_made(creating))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        raise


async def _destroy_when_made(creating: asyncio.Future[Sandbox]) -> None:
    with suppress(SandboxError):
        await (await creating).destroy()


class Filling:
    """Puts into a sandbox what the task says. `doing` names the present step, for whoever ends it."""

    def __init__(self, context: StageContext, sandbox: Sandbox, task: Task, limit_s: float) -> None:
        self._context = context
        self._sandbox = sandbox
        self._task = task
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s
        self.doing = ""

    def left_s(self) -> float:
        """Seconds until all of it must be done."""
        return max(self._until_s - time.monotonic(), 0.05)

    async def fill(self) -> None:
        """Repository, files and setup commands, without the agent.

        Raises SandboxError, StageFailed of class init, and TimeoutError when it is the repository that takes too long.
        """
        spec = self._task.sandbox
        if spec.repository is not None:
            self.doing = f"fetching the repository {hidden(spec.repository.url)}"
            try:
                async with (
                    asyncio.timeout(self.left_s()),
                    self._context.repositories.archive(spec.repository) as archive,
                ):
                    self.doing = f"unpacking the repository {hidden(spec.repository.url)}"
                    await self._sandbox.put_tree(archive, spec.repository.path or ".")
            except SandboxError as error:
                raise StageFailed(Failure.of("init", error.message, error.hint)) from error
        self.doing = "writing sandbox.files"
        await self._sandbox.put_files(spec.files)
        for number, step in enumerate(spec.steps(), 1):
            self.doing = f"setup command {number}"
            await run_step(self._sandbox, number, step, spec.env, until_s=self._until_s, limit_s=self._limit_s)


async def fill_sandbox(context: StageContext, sandbox: Sandbox, task: Task, *, limit_s: float | None = None) -> None:
    """Repository, files and setup commands, without the agent; commands get `limit_s` in all, else timeouts.init_s.

    Raises SandboxError, StageFailed of class init, and TimeoutError when it is the repository that takes too long.
    """
    await Filling(context, sandbox, task, limit_s or task.timeouts.init_s).fill()
