"""EVAL: produces the reward by the task's rule. A missing reward is null, never 0."""

from __future__ import annotations

import asyncio

import structlog

from rollyard.pipeline.codec import decode
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.handover import Held, advance
from rollyard.schemas import subjects
from rollyard.schemas.errors import EvaluationError, RollyardError, SandboxError, TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, DestroySandbox, RolloutEvent, RolloutState, StageName
from rollyard.stages.evaluator import EvalContext, open_rule
from rollyard.stages.stage import StageContext, StageFailed, now_ms

log = structlog.get_logger(__name__)


class Eval:
    """The stage that judges what the agent did."""

    name: StageName = "eval"

    def __init__(self, context: StageContext) -> None:
        self._context = context

    async def work(self, held: Held) -> RolloutState:
        """Evaluate; the next state is aggregate, with the sandbox gone."""
        state, started_ms = held.state, now_ms()
        if state.sandbox is None:
            raise StageFailed(Failure.of("infra", "the rollout came to EVAL without a sandbox"))
        task = await self._context.tasks.get(state.rollout.run, state.rollout.task_id)
        sandbox = await self._context.backend(state.sandbox.backend).open(state.sandbox)
        rule = open_rule(task.evaluation.rule, task.evaluation.args)
        timeout_s = task.timeouts.eval_s
        try:
            async with asyncio.timeout(timeout_s):
                verdict = await rule.reward(
                    EvalContext(task=task, result=await self._result(state), sandbox=sandbox, timeout_s=timeout_s)
                )
        except TimeoutError:
            raise StageFailed(
                Failure.of("eval", f"the evaluation took longer than {timeout_s:g} s", "raise timeouts.eval_s")
            ) from None
        checkpoint("eval.judged")
        evaluated_seq = await self._context.record(
            RolloutEvent(
                kind="evaluated",
                rollout=state.rollout,
                attempt=state.attempt,
                started_ms=started_ms,
                at_ms=now_ms(),
                worker=self._context.worker,
                reward=verdict.reward,
                metrics=dict(verdict.metrics),
                turn_rewards=tuple(verdict.turn_rewards),
            )
        )
        effects = (DestroySandbox(attempt=state.attempt, sandbox=state.sandbox),)
        return advance(state, position="aggregate", effects=effects, evaluated_seq=evaluated_seq)

    def failure(self, error: RollyardError) -> Failure | None:
        """A rule that cannot judge ends the attempt as `eval`; a sandbox out of reach is infrastructure."""
        if isinstance(error, EvaluationError | TaskError):
            return Failure.of("eval", error.message, error.hint)
        if isinstance(error, SandboxError):
            return Failure.of("infra", error.message, error.hint)
        return None

    async def abandon(self, state: RolloutState) -> None:
        """Nothing to undo."""

    async def _result(self, state: RolloutState) -> AgentResult:
        """What the agent left behind, from the event that RUN logged."""
        stored = await self._context.bus.get(subjects.LOG, state.closed_seq)
        if stored is None:
            raise StageFailed(Failure.of("infra", f"the log has no event {state.closed_seq}", "was the run purged?"))
        event: RolloutEvent = decode(stored.data, RolloutEvent)
        return event.result or AgentResult(exit_code=None)
