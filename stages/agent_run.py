"""One attempt's time in RUN: its agent, however it is run, with the hooks around it, and what is kept of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from rollyard.harnesses.harness import AgentContext, InProcessHarness
from rollyard.pipeline.crash import checkpoint
from rollyard.schemas.errors import BusError, DecodeError, HarnessError, SandboxError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutState
from rollyard.schemas.task import Task
from rollyard.stages.checked_harness import CheckedHarness
from rollyard.stages.collection import Collection
from rollyard.stages.handler import Handler, HandlerContext, as_result
from rollyard.stages.hook import HookContext, hooks_of
from rollyard.stages.hook_chain import HookChain
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageContext, now_ms
from rollyard.stages.synthetic import log_synthetic_call
from rollyard.stages.watch import AGENT, Watch, read_calls, too_late, used_up
from rollyard.stages.wishes import wants_diff

log = structlog.get_logger(__name__)

STARTED_FILE: Final = ".rollyard/started"
MAX_OUTPUT_BYTES: Final = 256 * 1024

Ended = tuple[AgentResult, Failure | None]


class _Started(msgspec.Struct, frozen=True):
    """In the sandbox's home, once every `before_run` is through: when that was, Unix ms."""

    at_ms: int


@dataclass(slots=True, kw_only=True)
class AgentRun:
    """One attempt in RUN."""

    stage: StageContext
    state: RolloutState
    task: Task
    harness: CheckedHarness
    agent: AgentContext
    handler: Handler | None
    sandbox: Sandbox | None  # None: the backend has none
    kept: Collection
    hooks: HookChain
    started_ms: int = field(default_factory=now_ms)

    @classmethod
    def of(
        cls,
        stage: StageContext,
        state: RolloutState,
        task: Task,
        *,
        sandbox: Sandbox | None,
        harness: CheckedHarness,
        agent: AgentContext,
        handler: Handler | None,
    ) -> AgentRun:
        """Raises TaskError for a hook that does not exist, or does not take its arguments."""
        kept = Collection(stage.bus.blobs)
        new_context = partial(
            HookContext,
            task=task,
            rollout=state.rollout,
            attempt=state.attempt,
            worker=stage.worker,
            sandbox=sandbox,
            read_progress=partial(_progress, harness, sandbox) if sandbox is not None else None,
            read_calls=partial(read_calls, stage.bus, state.rollout, state.attempt),
        )
        return cls(
            stage=stage,
            state=state,
            task=task,
            harness=harness,
            agent=agent,
            handler=handler,
            sandbox=sandbox,
            kept=kept,
            hooks=HookChain.of(hooks_of(stage.config, task), new_context, kept),
        )

    @property
    def rollout(self) -> Rollout:
        """Whose attempt it is."""
        return self.state.rollout

    async def before(self) -> None:
        """Call the hooks' `before_run`, unless a worker before this one has been through. Raises StageFailed.

        A file in the sandbox says so, which is written only where it matters.
        """
        expires = self.task.agent.max_wall_s is not None
        if self.sandbox is None or not (self.hooks.members or expires):
            await self.hooks.before_run()
            return
        known = await self._known_start(self.sandbox)
        if known is None:
            await self.hooks.before_run()
            known = _Started(now_ms())
            files: dict[str, str | bytes] = {STARTED_FILE: msgspec.json.encode(known)}
            if expires:
                # The key that INIT wrote is as old as the sandbox; the time of the key begins now.
                files |= self.harness.files(self.agent)
            await self.sandbox.put_files(files, base="home")
        else:
            for context in self.hooks.contexts():
                context.attached = True
        self.started_ms = known.at_ms
        for context in self.hooks.contexts():
            context.started_ms = known.at_ms

    async def _known_start(self, sandbox: Sandbox) -> _Started | None:
        data = await sandbox.read_file(f"{sandbox.home}/{STARTED_FILE}", 100)
        try:
            return msgspec.json.decode(data, type=_Started) if data else None
        except msgspec.MsgspecError:
            return _Started(self.started_ms)

    # --- the agent ---

    async def in_sandbox(self, sandbox: Sandbox) -> Ended:
        """Start the agent, or attach to it, and see it to its end."""
        capabilities = self.stage.backend(sandbox.ref.backend).capabilities
        watch = Watch(self.stage.bus, sandbox, self.rollout, keeps_ends=capabilities.keeps_ends)
        checkpoint("run.prepared")
        command = self.harness.command(self.agent)
        if not await sandbox.start(AGENT, command, deadline_s=self.task.timeouts.run_s):
            log.info("reattached", rollout=self.rollout.rollout_id, attempt=self.state.attempt)
        checkpoint("run.agent_started")
        async with AsyncExitStack() as stack:
            if self.hooks.members:
                await stack.enter_async_context(self.hooks.during_run(watch.end))
            idle = self._looks_for_idleness(watch)
            try:
                end = await sandbox.wait(AGENT)
            finally:
                if idle is not None:
                    idle.cancel()
        stdout, stderr = await sandbox.output(AGENT, MAX_OUTPUT_BYTES)
        try:
            result = await self.harness.result(self.agent, end.exit_code, stdout, stderr, sandbox.read_file)
            result = msgspec.structs.replace(result, metrics=self.harness.progress(stdout, stderr) | result.metrics)
        except HarnessError as error:
            # No budget explains it, and what the agent wrote is kept all the same.
            return AgentResult(exit_code=end.exit_code), Failure.of("agent", error.message, error.hint)
        failure = await watch.why(end, self.task) or result.failure
        return result, await self._or_used_up(failure)

    async def in_this_process(self, harness: InProcessHarness) -> Ended:
        """An agent that needs no process of its own."""
        async with self.hooks.during_run(_cannot_end):
            try:
                async with asyncio.timeout(self.task.timeouts.run_s):
                    result = await harness.work(self.agent)
            except TimeoutError:
                return AgentResult(exit_code=None), too_late(self.task)
        await log_synthetic_call(self.stage.bus, self.agent)
        return result, result.failure

    async def by_handler(self, handler: Handler) -> Ended:
        """The task's own class in place of an agent. Its own work comes again after a worker's death."""
        limit_s = self.task.timeouts.run_s
        context = HandlerContext(
            task=self.task,
            rollout=self.rollout,
            attempt=self.state.attempt,
            base_url=self.agent.base_url,
            api_key=self.agent.api_key,
            sandbox=self.sandbox,
            carried=self.state.carried,
            timeout_s=limit_s,
            default=self._default,
        )
        async with self.hooks.during_run(_cannot_end):
            try:
                value = await handler.call("run", context, limit_s)
            except TimeoutError:
                return AgentResult(exit_code=None), too_late(self.task)
        result = as_result(value)
        return result, await self._or_used_up(result.failure)

    async def _default(self) -> AgentResult:
        """What the stage itself would do, for a handler that wants something around it."""
        if self.sandbox is None:
            raise SandboxError("the sandbox backend of the task has no place for an agent", hint="use 'local'")
        sandbox = self.sandbox
        await sandbox.put_files(self.harness.files(self.agent), base="home")
        result, failure = await self.in_sandbox(sandbox)
        return msgspec.structs.replace(result, failure=failure)

    def _looks_for_idleness(self, watch: Watch) -> asyncio.Task[Any] | None:
        limit_s = self.task.agent.max_idle_s
        return asyncio.create_task(watch.end_when_idle(limit_s)) if limit_s is not None else None

    async def _or_used_up(self, failure: Failure | None) -> Failure | None:
        """The failure, or that of a budget when that is what made the agent fail."""
        if failure is None or failure.kind not in ("agent", "llm"):
            return failure
        try:
            budget = await used_up(self.stage.bus, self.task.agent, self.rollout, self.state.attempt, self.started_ms)
        except (BusError, DecodeError) as error:
            log.warning("budget_not_known", rollout=self.rollout.rollout_id, error=str(error))
            return failure
        return budget or failure

    # --- what is kept ---

    async def collect(self) -> None:
        """Keep the agent's output, the files that task and harness name, and the diff. Raises BlobRefused."""
        if self.sandbox is None:
            return
        await self.kept.add_output(self.sandbox, AGENT, self.stage.config.worker.keep_output_bytes)
        await self.kept.add_files(self.sandbox, self.task.outputs)
        await self.kept.add_files(self.sandbox, self.harness.kept_files, base="home", prefix="home/")
        if wants_diff(self.task, hooks_of(self.stage.config, self.task)):
            await self.kept.add_diff(self.sandbox)


async def _cannot_end(reason: str) -> None:
    raise SandboxError("there is no agent's process to end", hint="the agent runs in the worker, or by a handler")


async def _progress(harness: CheckedHarness, sandbox: Sandbox) -> dict[str, float]:
    """How far the agent is. Raises HarnessError, SandboxError."""
    return harness.progress(*await sandbox.output(AGENT, MAX_OUTPUT_BYTES))
