"""Judging again what agents left behind: a new evaluation rule on logged results, without a model or a sandbox."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas.errors import EvaluationError, RollyardError, TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.sample import Commit
from rollyard.schemas.task import EvaluationSpec, Task
from rollyard.stages.evaluator import RULES, EvalContext, Rule, Verdict, isolation_of, open_rule
from rollyard.stages.remake import Draft, ran_of, with_verdict

TaskOf = Callable[[Commit], Awaitable[Task]]
"""The task of a rollout, as far as it is known."""

AT_A_TIME: Final = 8
REASONS_KEPT: Final = 20
OTHER_REASONS: Final = "other reasons"
_GONE: Final = "works in the agent's sandbox, which is gone"
_GONE_HINT: Final = "a new reward can come from what the agent answered: for example rule `python`, or `contains`"


def task_of_commit(commit: Commit) -> Task:
    """What a commit tells of its task: id, group size and metadata. Its prompt is empty: it is not known."""
    return Task(prompt="", id=commit.task_id, group_size=commit.group_size, metadata=commit.metadata)


def stored_tasks(store: TaskStore) -> TaskOf:
    """Tasks as they were submitted, or what the commit tells of one whose body is gone."""

    async def task_of(commit: Commit) -> Task:
        try:
            return await store.get(commit.run, commit.task_id)
        except TaskError:
            return task_of_commit(commit)

    return task_of


class Reevaluation:
    """One rule for many rollouts. `judged` counts verdicts, `failed` rollouts that got none, by reason.

    Arguments that the rule takes and `spec` does not give are those of the task's own evaluation. Without `task_of` a
    task is what the commit tells of it.
    """

    def __init__(self, spec: EvaluationSpec, task_of: TaskOf | None = None) -> None:
        """Raises TaskError when there is no such rule, it needs a sandbox, or it does not take an argument so."""
        self.spec = spec
        self.judged = 0
        self.failed: Counter[str] = Counter()
        self._task_of = task_of
        self._kind: Any = RULES.load(spec.rule)
        if getattr(self._kind, "isolation", "none") in ("same", "fresh"):
            raise TaskError(f"rule: {spec.rule!r} {_GONE}", hint=_GONE_HINT)
        self._check(spec.args)

    def _check(self, args: Mapping[str, Any]) -> None:
        if self._task_of is None or not _has_fields(self._kind):
            open_rule(self.spec.rule, args)
            return
        fields = {field.encode_name: field.type for field in structs.fields(self._kind)}
        for name, value in args.items():
            if name not in fields:
                raise TaskError(f"args.{name}: unknown argument", hint=f"arguments are: {', '.join(fields) or 'none'}")
            try:
                msgspec.convert(value, fields[name])
            except msgspec.ValidationError as error:
                raise TaskError(f"args.{name}: {error}", hint=f"correct it; it is {value!r:.60}") from error

    async def judge(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts with new verdicts, where an agent ran. A rule that fails leaves the reward null."""
        slots = asyncio.Semaphore(AT_A_TIME)

        async def one(draft: Draft) -> Draft:
            async with slots:
                return await self._judge(draft)

        async with asyncio.TaskGroup() as group:
            judging = [group.create_task(one(draft)) for draft in drafts]
        return [done.result() for done in judging]

    async def _judge(self, draft: Draft) -> Draft:
        ran = ran_of(draft)
        if ran is None:
            return draft
        try:
            verdict = await self._verdict(draft.commit, ran.result or AgentResult(exit_code=None))
            self.judged += 1
        except RollyardError as error:
            verdict = self._failure(str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to rules of other packages
            verdict = self._failure(f"the rule {self.spec.rule} failed: {type(error).__name__}: {error}")
        return with_verdict(draft, verdict)

    async def _verdict(self, commit: Commit, result: AgentResult) -> Verdict:
        task = await self._task_of(commit) if self._task_of else task_of_commit(commit)
        timeout_s = task.timeouts.eval_s
        context = EvalContext(task=task, result=result, sandbox=None, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._rule(task).reward(context)
        except TimeoutError:
            raise EvaluationError(f"the evaluation took longer than {timeout_s:g} s") from None

    def _rule(self, task: Task) -> Rule:
        known = structs.fields(self._kind) if _has_fields(self._kind) else ()
        own = {field.encode_name for field in known}
        taken = {name: value for name, value in task.evaluation.args.items() if name in own}
        rule = open_rule(self.spec.rule, taken | self.spec.args)
        if isolation_of(rule) != "none":  # of some it is known with their arguments only
            raise TaskError(f"rule: {self.spec.rule!r} {_GONE}", hint=_GONE_HINT)
        return rule

    def _failure(self, reason: str) -> Verdict:
        self.failed[reason if reason in self.failed or len(self.failed) < REASONS_KEPT else OTHER_REASONS] += 1
        return Verdict(None)


def _has_fields(rule: Any) -> bool:
    return isinstance(rule, type) and issubclass(rule, Struct)
