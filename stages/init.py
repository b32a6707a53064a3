"""INIT: makes the sandbox ready: files, setup commands, and what the agent's harness wants to find."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.handover import Held, advance
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import ConfigError, HarnessError, RollyardError, SandboxError, TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import RolloutEvent, RolloutState, StageName
from rollyard.schemas.task import Task
from rollyard.stages.agent_context import agent_context
from rollyard.stages.agent_install import agent_mounts, install_agent
from rollyard.stages.changes import mark_baseline
from rollyard.stages.checked_harness import open_checked
from rollyard.stages.handler import HandlerContext, carried, find_handler
from rollyard.stages.hook import hooks_of
from rollyard.stages.preparation import Filling, image_of, let_go, make_sandbox
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageContext, StageFailed, now_ms
from rollyard.stages.wishes import wants_diff

log = structlog.get_logger(__name__)

GRACE_S: Final = 10.0
"""How long a step that was ended at its time limit may take to say so."""


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
        await image_of(self._context, task)  # has a time limit of its own
        sandbox, kept = await self._ready(state, task)
        try:
            checkpoint("init.prepared")
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
            await let_go(sandbox)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return advance(state, position="run", place=sandbox.ref.place, sandbox=sandbox.ref, carried=kept)

    def failure(self, error: RollyardError) -> Failure | None:
        """Sandboxes and harnesses that cannot be prepared end the attempt; the bus does not."""
        if isinstance(error, SandboxError | HarnessError):
            return Failure.of("init", error.message, error.hint)
        if isinstance(error, TaskError | ConfigError):
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

    async def _ready(self, state: RolloutState, task: Task) -> tuple[Sandbox, Any]:
        """A sandbox with everything in it, and what the handler carries on; no sandbox is left when it fails."""
        limit_s, sandbox, doing = task.timeouts.init_s, None, "making the sandbox"
        filling: Filling | None = None
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                backend = self._context.backend(task.sandbox.backend)
                mounts = agent_mounts(task.agent, backend.capabilities)
                sandbox = await make_sandbox(self._context, state, task, mounts=mounts)
                checkpoint("init.made")
                filling = Filling(self._context, sandbox, task, limit_s)
                return sandbox, await self._prepare(filling, sandbox, state, task)
        except BaseException as error:
            if sandbox is not None:
                await asyncio.shield(sandbox.destroy())
            if isinstance(error, TimeoutError):
                doing = filling.doing if filling is not None else doing
                what = f"INIT took longer than {limit_s:g} s, the last of it {doing}"
                raise StageFailed(Failure.of("init", what, "raise timeouts.init_s")) from None
            raise

    async def _prepare(self, filling: Filling, sandbox: Sandbox, state: RolloutState, task: Task) -> Any:
        """Fill an empty sandbox, by the stage or the task's handler, then the agent; returns what is carried on."""
        handler, kept = find_handler(self._context.config, task), None
        harness = open_checked(task.agent.harness)
        capabilities = self._context.backend(task.sandbox.backend).capabilities
        if handler is not None and handler.has("init"):
            agent = agent_context(self._context, state, task, sandbox, harness)
            filling.doing = f"init of the handler {handler.name}"
            context = HandlerContext(
                task=task,
                rollout=state.rollout,
                attempt=state.attempt,
                base_url=agent.base_url,
                api_key=agent.api_key,
                sandbox=sandbox if capabilities.processes else None,
                timeout_s=filling.left_s(),
                default=filling.fill,
            )
            kept = carried(await handler.call("init", context, filling.left_s()))
        else:
            await filling.fill()
        if handler is None or not handler.has("run"):
            filling.doing = f"installing the agent {task.agent.harness}"
            await install_agent(sandbox, task.agent, capabilities)
            agent = agent_context(self._context, state, task, sandbox, harness)
            await sandbox.put_files(harness.files(agent), base="home")
        if capabilities.processes and wants_diff(task, hooks_of(self._context.config, task)):
            filling.doing = "keeping the state before the agent"
            path = task.sandbox.repository.path if task.sandbox.repository is not None else ""
            await mark_baseline(sandbox, path, timeout_s=filling.left_s())
        return kept
