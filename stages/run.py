"""RUN: starts the agent detached inside its sandbox, or attaches to one that runs there already, and watches it."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from rollyard.harnesses.harness import AgentContext, Harness, InProcessHarness, open_harness
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.handover import Held, advance
from rollyard.schemas.errors import HarnessError, RollyardError, SandboxError, TaskError
from rollyard.schemas.failure import Failure, Status
from rollyard.schemas.rollout import AgentResult, CloseSession, RolloutEvent, RolloutState, StageName
from rollyard.schemas.task import Task
from rollyard.stages.agent_context import agent_context
from rollyard.stages.sandbox import ProcessEnd, Sandbox
from rollyard.stages.stage import StageContext, StageFailed, now_ms
from rollyard.stages.synthetic import log_synthetic_call

log = structlog.get_logger(__name__)

AGENT: Final = "agent"
MAX_OUTPUT_BYTES: Final = 256 * 1024


class Run:
    """The stage in which the agent works."""

    name: StageName = "run"

    def __init__(self, context: StageContext) -> None:
        self._context = context

    async def work(self, held: Held) -> RolloutState:
        """See the agent to its end; the next state is EVAL, with the agent's session closed."""
        state, started_ms = held.state, now_ms()
        if state.sandbox is None:
            raise StageFailed(Failure.of("infra", "the rollout came to RUN without a sandbox"))
        task = await self._context.tasks.get(state.rollout.run, state.rollout.task_id)
        sandbox = await self._context.backend(state.sandbox.backend).open(state.sandbox)
        harness = open_harness(task.agent.harness)
        context = agent_context(self._context, state, task, sandbox, harness)
        if harness.in_process and isinstance(harness, InProcessHarness):
            result, failure = await self._work_here(harness, context, task)
        else:
            result, failure = await self._watch(sandbox, harness, context, task)
        checkpoint("run.agent_ended")
        if failure is not None and failure.kind != "agent_budget":
            raise StageFailed(failure)
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
        # A harness that got no key has no session to close.
        effects = () if harness.in_process else (CloseSession(attempt=state.attempt),)
        return advance(state, position="eval", effects=effects, closed_seq=closed_seq, status=status, failure=failure)

    def failure(self, error: RollyardError) -> Failure | None:
        """A sandbox that cannot be reached is infrastructure, a harness that cannot be read the agent's failure."""
        if isinstance(error, SandboxError):
            return Failure.of("infra", error.message, error.hint)
        if isinstance(error, HarnessError | TaskError):
            return Failure.of("agent", error.message, error.hint)
        return None

    async def abandon(self, state: RolloutState) -> None:
        """Nothing to undo: whoever moved the rollout owns the agent now."""

    async def _work_here(
        self, harness: InProcessHarness, context: AgentContext, task: Task
    ) -> tuple[AgentResult, Failure | None]:
        try:
            async with asyncio.timeout(task.timeouts.run_s):
                result = await harness.work(context)
        except TimeoutError:
            return AgentResult(exit_code=None), _too_late(task)
        await log_synthetic_call(self._context.bus, context)
        return result, result.failure

    async def _watch(
        self, sandbox: Sandbox, harness: Harness, context: AgentContext, task: Task
    ) -> tuple[AgentResult, Failure | None]:
        fresh = await sandbox.start(AGENT, harness.command(context), deadline_s=task.timeouts.run_s)
        if not fresh:
            log.info("reattached", rollout=context.rollout.rollout_id, attempt=context.attempt)
        checkpoint("run.agent_started")
        end = await sandbox.wait(AGENT)
        stdout, stderr = await sandbox.output(AGENT, MAX_OUTPUT_BYTES)
        result = await harness.result(context, end.exit_code, stdout, stderr, sandbox.read_file)
        return result, _why(end, task) or result.failure


def _too_late(task: Task) -> Failure:
    limit_s = task.timeouts.run_s
    return Failure.of("agent_budget", f"the agent was still running after {limit_s:g} s", "raise timeouts.run_s")


def _why(end: ProcessEnd, task: Task) -> Failure | None:
    """What the way in which the process ended says, before anybody looks at its output."""
    match end.reason:
        case "exited":
            return None
        case "deadline":
            return _too_late(task)
        case "lease":
            return Failure.of("infra", "no worker renewed the lease of the agent's sandbox")
        case "killed":
            return Failure.of("infra", "the agent was killed from outside")
        case "memory":
            return Failure.of(
                "agent_budget", "the agent's sandbox was out of memory", "raise sandbox.limits.memory_bytes"
            )
        case "lost":
            return Failure.of("infra", "the agent's end was not seen: its shim died")
