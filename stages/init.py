"""INIT: makes the sandbox ready: files, setup commands, and what the agent's harness wants to find."""

from __future__ import annotations

import asyncio

import structlog

from rollyard.harnesses.harness import open_harness
from rollyard.pipeline.handover import Held, advance
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import HarnessError, RollyardError, SandboxError, TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import RolloutEvent, RolloutState, StageName
from rollyard.schemas.task import Task
from rollyard.stages.agent_context import agent_context
from rollyard.stages.preparation import fill_sandbox, make_sandbox
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageContext, StageFailed, now_ms

log = structlog.get_logger(__name__)


class Init:
    """The stage that turns an admitted rollout into a ready sandbox."""

    name: StageName = "init"

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._states: Bucket[RolloutState] = Bucket(context.bus, subjects.ROLLOUTS, RolloutState)

    async def work(self, held: Held) -> RolloutState:
        """Make a sandbox and prepare it; the next state is RUN, at the sandbox's place."""
        state, started_ms = held.state, now_ms()
        task = await self._context.tasks.get(state.rollout.run, state.rollout.task_id)
        sandbox = await make_sandbox(self._context, state, task)
        try:
            try:
                async with asyncio.timeout(task.timeouts.init_s):
                    await self._prepare(sandbox, state, task)
            except TimeoutError:
                raise StageFailed(
                    Failure.of("init", f"INIT took longer than {task.timeouts.init_s:g} s", "raise timeouts.init_s")
                ) from None
            await self._context.record(
                RolloutEvent(
                    kind="initialized",
                    rollout=state.rollout,
                    attempt=state.attempt,
                    started_ms=started_ms,
                    at_ms=now_ms(),
                    worker=self._context.worker,
                    place=sandbox.ref.place,
                )
            )
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return advance(state, position="run", place=sandbox.ref.place, sandbox=sandbox.ref)

    def failure(self, error: RollyardError) -> Failure | None:
        """Sandboxes and harnesses that cannot be prepared end the attempt; the bus does not."""
        if isinstance(error, SandboxError | HarnessError):
            return Failure.of("init", error.message, error.hint)
        if isinstance(error, TaskError):
            return Failure(kind="init", message=error.message, hint=error.hint)
        return None

    async def abandon(self, state: RolloutState) -> None:
        """Remove the sandbox that nobody will use: not the one that the rollout's state names after all."""
        if state.position != "run" or state.sandbox is None:
            return
        key = subjects.rollout_key(state.rollout.run, state.rollout.rollout_id)
        standing = await self._states.get(key)
        if standing is None or standing[0].sandbox != state.sandbox:
            await (await self._context.backend(state.sandbox.backend).open(state.sandbox)).destroy()

    async def _prepare(self, sandbox: Sandbox, state: RolloutState, task: Task) -> None:
        await fill_sandbox(self._context, sandbox, task)
        harness = open_harness(task.agent.harness)
        await sandbox.put_files(harness.files(agent_context(self._context, state, task, sandbox, harness)), base="home")
