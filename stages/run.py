"""RUN: starts the agent detached inside its sandbox, or attaches to one that runs there already, and watches it."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from rollyard.harnesses.harness import InProcessHarness
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.handover import Held, advance
from rollyard.schemas.errors import ConfigError, HarnessError, RollyardError, SandboxError, TaskError
from rollyard.schemas.failure import Failure, Status
from rollyard.schemas.rollout import AgentResult, CloseSession, RolloutEvent, RolloutState, StageName
from rollyard.schemas.task import Task
from rollyard.stages.agent_context import agent_context
from rollyard.stages.agent_run import AgentRun
from rollyard.stages.checked_harness import open_checked
from rollyard.stages.handler import find_handler
from rollyard.stages.preparation import let_go
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageContext, StageFailed, now_ms

log = structlog.get_logger(__name__)

COLLECTING_AT_A_TIME: Final = 8


class Run:
    """The stage in which the agent works."""

    name: StageName = "run"

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._collecting = asyncio.Semaphore(COLLECTING_AT_A_TIME)

    async def work(self, held: Held) -> RolloutState:
        """See the agent to its end; the next state is EVAL, with the agent's session closed."""
        state, started_ms = held.state, now_ms()
        if state.sandbox is None:
            raise StageFailed(Failure.of("infra", "the rollout came to RUN without a sandbox"))
        task = await self._context.tasks.get(state.rollout.run, state.rollout.task_id)
        sandbox = await self._context.backend(state.sandbox.backend).open(state.sandbox)
        try:
            run = self._open(state, task, sandbox)
            result, failure = await self._with_hooks(run)
        finally:
            await let_go(sandbox)
        checkpoint("run.collected")
        status: Status = "completed" if failure is None else "truncated"
        closed_seq = await self._context.record(
            RolloutEvent(
                kind="ran",
                rollout=state.rollout,
                attempt=state.attempt,
                started_ms=started_ms,
                at_ms=now_ms(),
                worker=self._context.worker,
                place=state.place,
                result=result,
                status=status,
                failure=failure,
            )
        )
        # An agent that got no key has no session to close.
        effects = (CloseSession(attempt=state.attempt),) if run.agent.api_key else ()
        return advance(state, position="eval", effects=effects, closed_seq=closed_seq, status=status, failure=failure)

    def failure(self, error: RollyardError) -> Failure | None:
        """A sandbox that cannot be reached is infrastructure, a harness that cannot be read the agent's failure."""
        if isinstance(error, SandboxError):
            return Failure.of("infra", error.message, error.hint)
        if isinstance(error, HarnessError | TaskError | ConfigError):
            return Failure.of("agent", error.message, error.hint)
        return None

    async def abandon(self, state: RolloutState) -> None:
        """Nothing to undo: whoever moved the rollout owns the agent now."""

    def _open(self, state: RolloutState, task: Task, sandbox: Sandbox) -> AgentRun:
        capabilities = self._context.backend(sandbox.ref.backend).capabilities
        harness = open_checked(task.agent.harness)
        return AgentRun.of(
            self._context,
            state,
            task,
            sandbox=sandbox if capabilities.processes else None,
            harness=harness,
            agent=agent_context(self._context, state, task, sandbox, harness),
            handler=find_handler(self._context.config, task),
        )

    async def _with_hooks(self, run: AgentRun) -> tuple[AgentResult, Failure | None]:
        """The agent's work within the hooks: what it left, and why it did not complete. Raises StageFailed."""
        try:
            try:
                await run.hooks.setup()
                await run.before()
                result, failure = await self._agent(run)
                checkpoint("run.agent_ended")
                return await self._after(run, result, failure)
            except asyncio.CancelledError:
                # A worker that stops leaves the agent, and its hooks, to the next one.
                if cancel := self._context.cancels.find(run.rollout):
                    await asyncio.shield(run.hooks.on_error(Failure.of("cancelled", cancel.reason)))
                raise
            except StageFailed as failed:
                await run.hooks.on_error(failed.failure)
                raise
            except RollyardError as error:
                if failure := self.failure(error):
                    await run.hooks.on_error(failure)
                raise
        finally:
            await run.hooks.cleanup()

    async def _agent(self, run: AgentRun) -> tuple[AgentResult, Failure | None]:
        if run.handler is not None and run.handler.has("run"):
            return await run.by_handler(run.handler)
        if run.harness.in_process and isinstance(run.harness, InProcessHarness):
            return await run.in_this_process(run.harness)
        if run.sandbox is None:
            raise SandboxError(
                f"the sandbox backend of the task has no place for the agent {run.task.agent.harness!r}",
                hint="use the backend 'local'",
            )
        return await run.in_sandbox(run.sandbox)

    async def _after(
        self, run: AgentRun, result: AgentResult, failure: Failure | None
    ) -> tuple[AgentResult, Failure | None]:
        async with self._collecting:
            await run.collect()
            try:
                await run.hooks.after_run(result, failure)
            except StageFailed as failed:
                raise StageFailed(failed.failure, run.hooks.added_to(result)) from failed
        result = run.hooks.added_to(result)
        if failure is not None and failure.kind != "agent_budget":
            raise StageFailed(failure, result)
        return result, failure
