"""EVAL: produces the reward by the task's rule. A missing reward is null, never 0."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog

from rollyard.pipeline.codec import decode
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.handover import Held, advance
from rollyard.schemas import subjects
from rollyard.schemas.errors import (
    ConfigError,
    EvaluationError,
    HarnessError,
    ModelError,
    RollyardError,
    SandboxError,
    SetupError,
    TaskError,
)
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import (
    AgentResult,
    CloseSession,
    DestroySandbox,
    Effect,
    RolloutEvent,
    RolloutState,
    StageName,
)
from rollyard.schemas.task import Task
from rollyard.stages.bounded import TooSlow
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.changes import working_diff
from rollyard.stages.eval_sandbox import FreshSandboxes
from rollyard.stages.evaluator import (
    EvalContext,
    EvaluationHopeless,
    Rule,
    Verdict,
    as_verdict,
    isolation_of,
    open_rule,
    reward_of,
)
from rollyard.stages.handler import Handler, HandlerContext, find_handler
from rollyard.stages.judge import judge_access, judge_attempt
from rollyard.stages.preparation import let_go
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageContext, StageFailed, now_ms

log = structlog.get_logger(__name__)

FIRST_PAUSE_S: Final = 0.5
MOST_PAUSE_S: Final = 10.0
GRACE_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class _Case:
    """One rollout that is judged."""

    state: RolloutState
    task: Task
    result: AgentResult
    agent: Sandbox
    rule: Rule
    capabilities: Capabilities
    handler: Handler | None = None


class Eval:
    """The stage that judges what the agent did."""

    name: StageName = "eval"

    def __init__(self, context: StageContext) -> None:
        self._context = context

    async def work(self, held: Held) -> RolloutState:
        """Evaluate; the next state is aggregate, with the sandboxes gone."""
        state, started_ms = held.state, now_ms()
        if state.sandbox is None:
            raise StageFailed(Failure.of("infra", "the rollout came to EVAL without a sandbox"))
        task = await self._context.tasks.get(state.rollout.run, state.rollout.task_id)
        backend = self._context.backend(state.sandbox.backend)
        agent = await backend.open(state.sandbox)
        rule = open_rule(task.evaluation.rule, task.evaluation.args)
        handler = find_handler(self._context.config, task)
        result = await self._result(state)
        case = _Case(state, task, result, agent, rule, backend.capabilities, handler)
        fresh = FreshSandboxes(self._context, state, task, agent)
        try:
            verdict, more = await self._verdict(case, fresh, again=held.deliveries > 1)
        finally:
            await fresh.let_go()
            await let_go(agent)
        effects: list[Effect] = [DestroySandbox(attempt=state.attempt, sandbox=state.sandbox), *more]
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
                rewards=dict(verdict.rewards),
                metrics=dict(verdict.metrics),
                turn_rewards=tuple(verdict.turn_rewards),
                log=verdict.log,
            )
        )
        return advance(state, position="aggregate", effects=effects, evaluated_seq=evaluated_seq)

    async def _verdict(self, case: _Case, fresh: FreshSandboxes, *, again: bool) -> tuple[Verdict, list[Effect]]:
        """The verdict, and what is to be undone of its making."""
        attempt = case.state.attempt
        verdict = await skipped(case.task, case.state, case.result, _sandbox_of(case, case.capabilities))
        if verdict is not None:
            return verdict, []
        verdict = await self._judge(case, fresh, again=again)
        made: list[Effect] = [DestroySandbox(attempt=attempt, sandbox=ref) for ref in fresh.standing()]
        # A judge's key works no longer than the evaluation.
        return verdict, [*made, CloseSession(attempt=judge_attempt(attempt))]

    def failure(self, error: RollyardError) -> Failure | None:
        """A rule that cannot judge ends the attempt as `eval`; a sandbox out of reach is infrastructure."""
        if isinstance(error, EvaluationError | TaskError | ConfigError | SetupError | ModelError | HarnessError):
            return Failure.of("eval", error.message, error.hint)
        if isinstance(error, SandboxError):
            return Failure.of("infra", error.message, error.hint)
        return None

    async def abandon(self, state: RolloutState) -> None:
        """Remove what a lost evaluation made: whoever moved the rollout does not know of it."""
        for effect in state.effects:
            if isinstance(effect, DestroySandbox) and effect.sandbox != state.sandbox:
                await self._context.perform(state, effect)

    async def _judge(self, case: _Case, fresh: FreshSandboxes, *, again: bool) -> Verdict:
        """Try the rule until it works, each time in a sandbox of its own where it is to have one."""
        spec = case.task.evaluation
        isolation = isolation_of(case.rule, spec)
        number = 1
        try:
            if again and case.capabilities.processes:
                number = await fresh.find()
            while True:
                try:
                    return await self._handled(case, fresh, number)
                except (EvaluationError, SandboxError) as error:
                    # Nothing but another attempt brings back a sandbox that is gone with what the agent did in it.
                    lost = isinstance(error, SandboxError) and isolation != "fresh"
                    if number >= spec.max_tries or isinstance(error, EvaluationHopeless) or lost:
                        raise
                    log.info("evaluation_again", rollout=case.state.rollout.rollout_id, number=number, error=str(error))
                await fresh.destroy()
                await asyncio.sleep(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)))
                number += 1
        except asyncio.CancelledError:
            # A worker that stops leaves the verifier at work, for the next one to attach to.
            if self._context.cancels.find(case.state.rollout) is not None:
                await asyncio.shield(fresh.destroy())
            raise
        except BaseException:
            await asyncio.shield(fresh.destroy())
            raise

    async def _handled(self, case: _Case, fresh: FreshSandboxes, number: int) -> Verdict:
        """By the task's handler where it judges itself, else by the rule."""
        handler = case.handler
        if handler is None or not handler.has("eval"):
            return await self._try(case, fresh, number)
        timeout_s = case.task.timeouts.eval_s
        context = HandlerContext(
            task=case.task,
            rollout=case.state.rollout,
            attempt=case.state.attempt,
            base_url=self._context.config.gateway.address() + "/v1",
            api_key="",
            sandbox=_sandbox_of(case, case.capabilities),
            carried=case.state.carried,
            result=case.result,
            timeout_s=timeout_s,
            default=lambda: self._try(case, fresh, number),
        )
        try:
            value = await handler.call("eval", context, timeout_s)
        except TimeoutError:
            raise _late(timeout_s) from None
        except StageFailed as failed:
            raise EvaluationError(failed.failure.message, hint=failed.failure.hint) from failed
        return as_verdict(value, f"eval of the handler {handler.name!r}")

    async def _try(self, case: _Case, fresh: FreshSandboxes, number: int) -> Verdict:
        """One try at the rule, in its sandbox. Raises EvaluationError, SandboxError."""
        isolation = isolation_of(case.rule, case.task.evaluation)
        agent = _sandbox_of(case, case.capabilities)
        sandbox = await fresh.ready(case.rule, number) if isolation == "fresh" and agent is not None else agent
        checkpoint("eval.sandbox_ready")
        timeout_s = case.task.timeouts.eval_s
        context = EvalContext(
            task=case.task,
            result=case.result,
            sandbox=sandbox,
            agent=agent,
            isolation=isolation,
            capabilities=case.capabilities,
            timeout_s=timeout_s,
            process="eval" if number == 1 else f"eval-{number}",
            judge=judge_access(self._context, case.state, timeout_s),
            diff=(lambda: _diff(agent)) if agent is not None else None,
        )
        try:
            # A verifier ends at its own limit, which tells more.
            return await reward_of(case.rule, case.task.evaluation.rule, context, timeout_s=timeout_s + GRACE_S)
        except TooSlow:
            raise _late(timeout_s) from None
        except SandboxError as error:
            if isolation != "fresh":
                raise
            # It was ready: whatever became of it, what ran there did it.
            raise EvaluationError(f"the sandbox of the evaluation failed: {error.message}", hint=error.hint) from error

    async def _result(self, state: RolloutState) -> AgentResult:
        """What the agent left behind, from the event that RUN logged."""
        stored = await self._context.bus.get(subjects.LOG, state.closed_seq)
        if stored is None:
            raise StageFailed(Failure.of("infra", f"the log has no event {state.closed_seq}", "was the run purged?"))
        event: RolloutEvent = decode(stored.data, RolloutEvent)
        return event.result or AgentResult(exit_code=None)


def _late(timeout_s: float) -> EvaluationError:
    return EvaluationError(f"the evaluation took longer than {timeout_s:g} s", hint="raise timeouts.eval_s")


async def skipped(task: Task, state: RolloutState, result: AgentResult, agent: Sandbox | None) -> Verdict | None:
    """The verdict of a rollout that is not worth the rule, by `evaluation.skip`; None: judge it."""
    for reason in task.evaluation.skip:
        if reason == "truncated":
            applies = state.status == "truncated"
        elif reason == "no_answer":
            applies = not result.answer.strip()
        else:
            changed = await _diff(agent) if agent is not None else None
            applies = changed is not None and not changed.strip()
        if applies:
            return Verdict(task.evaluation.skip_reward, {f"skipped_{reason}": 1.0})
    return None


async def _diff(agent: Sandbox) -> bytes | None:
    try:
        return await working_diff(agent)
    except SandboxError as error:
        # The sandbox is there, and what the agent left in it is such that git cannot tell: trying again tells no more.
        if error.message.startswith("the diff"):
            raise EvaluationHopeless(error.message, hint=error.hint) from error
        raise


def _sandbox_of(case: _Case, capabilities: Capabilities) -> Sandbox | None:
    return case.agent if capabilities.processes else None
