"""The hooks of one rollout at work: in their order, each within its time limit, none in the way of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog
from msgspec import structs

from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.task import HookSpec
from rollyard.stages.bounded import TooSlow, call
from rollyard.stages.collection import Collection
from rollyard.stages.hook import DEFAULT_TIMEOUT_S, HookContext, Veto, open_hook
from rollyard.stages.stage import StageFailed

log = structlog.get_logger(__name__)

TROUBLES: Final = "hook_failures"
MAX_TROUBLES: Final = 20
_MAY_VETO: Final = ("before_run", "after_run")
_AT_THE_END: Final = ("on_error", "cleanup")


@dataclass(slots=True)
class _Member:
    """A hook of the chain with its context; `out`: its setup failed, so that nothing more is asked of it."""

    spec: HookSpec
    hook: Any
    context: HookContext
    out: bool = False

    def timeout_s(self) -> float:
        return float(getattr(self.hook, "timeout_s", DEFAULT_TIMEOUT_S))


@dataclass(slots=True)
class HookChain:
    """The hooks of one rollout. `new_context` makes a context for each; `kept` takes the files that they add."""

    kept: Collection
    members: list[_Member] = field(default_factory=list)
    troubles: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, specs: Sequence[HookSpec], new_context: Callable[[], HookContext], kept: Collection) -> HookChain:
        """Make the hooks. Raises TaskError for one that does not exist, or does not take its arguments."""
        return cls(kept, [_Member(spec, open_hook(spec), new_context()) for spec in specs])

    def contexts(self) -> Iterator[HookContext]:
        """The contexts of all hooks, to tell them what is new."""
        return (member.context for member in self.members)

    async def setup(self) -> None:
        """Raises StageFailed when a hook fails whose policy says so; another one that fails is left out."""
        for member in self.members:
            member.out = not await self._call(member, "setup")

    async def before_run(self) -> None:
        """Raises StageFailed by a veto, or when a hook fails whose policy says so."""
        for member in self.members:
            await self._call(member, "before_run")

    @asynccontextmanager
    async def during_run(self, end_agent: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
        """Let them work while the agent runs. Raises StageFailed after it when one failed whose policy says so."""
        tasks: list[asyncio.Task[bool]] = []
        for member in self.members:
            if not member.out and hasattr(member.hook, "during_run"):
                member.context.end_agent = end_agent
                tasks.append(asyncio.create_task(self._call(member, "during_run")))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def after_run(self, result: AgentResult, failure: Failure | None) -> None:
        """Raises StageFailed by a veto, or when a hook fails whose policy says so."""
        for member in self.members:
            member.context.result, member.context.failure = self.added_to(result), failure
            await self._call(member, "after_run", member.context.result)

    async def on_error(self, failure: Failure) -> None:
        """Tell them how the attempt ends. Raises nothing of theirs."""
        for member in self.members:
            member.context.failure = failure
            await self._call(member, "on_error", failure)

    async def cleanup(self) -> None:
        """Let go of what they hold, the last one first. Raises nothing of theirs."""
        for member in reversed(self.members):
            member.out = False
            await self._call(member, "cleanup")

    def added_to(self, result: AgentResult) -> AgentResult:
        """The result with what the hooks have added so far; what a later one says under the same name counts."""
        metrics, metadata = dict(result.metrics), dict(result.metadata)
        for member in self.members:
            metrics |= member.context.metrics
            metadata |= member.context.metadata
        if self.troubles:
            metrics[TROUBLES] = float(len(self.troubles))
            metadata[TROUBLES] = self.troubles[:MAX_TROUBLES]
        return structs.replace(
            result,
            metrics=metrics,
            metadata=metadata | self.kept.metadata(),
            artifacts=tuple(self.kept.artifacts.values()),
        )

    async def _call(self, member: _Member, step: str, *arguments: Any) -> bool:
        """One call of one hook; False when it failed and its policy is to ignore that. Raises StageFailed."""
        function = getattr(member.hook, step, None)
        if function is None or member.out:
            return not member.out
        context = member.context
        try:
            await call(function, context, *arguments, timeout_s=None if step == "during_run" else member.timeout_s())
        except Veto as veto:
            if step in _MAY_VETO:
                log.info("hook_vetoed", hook=member.spec.hook, step=step, reason=veto.failure.message)
                raise StageFailed(veto.failure) from veto
            self._trouble(member, step, veto)
            return False
        except Exception as error:  # noqa: BLE001 - the boundary: the user's own code
            if isinstance(error, TooSlow):
                # A thread cannot be ended: what it may still say goes nowhere.
                context.closed = True
                member.context = replace(context, closed=False)
            self._trouble(member, step, error)
            return False
        finally:
            files, context.files = context.files, {}
            for name, data in files.items():
                await self.kept.add(name, data)
        return True

    def _trouble(self, member: _Member, step: str, error: Exception) -> None:
        """Count and log a hook that failed. Raises StageFailed when its policy says so."""
        name = member.spec.hook
        said = (str(error) if isinstance(error, TooSlow) else f"{type(error).__name__}: {error}")[:500]
        log.warning("hook_failed", hook=name, step=step, error=said, rollout=member.context.rollout.rollout_id)
        self.troubles.append({"hook": name, "step": step, "error": said})
        if member.spec.on_failure == "fail" and step not in _AT_THE_END:
            raise StageFailed(Failure.of("infra", f"{step} of the hook {name!r} failed: {said}", "see on_failure"))
