"""What an evaluation rule is: how the reward of one rollout is made. One rule a file in stages/evaluators/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

import msgspec
from msgspec import Struct

from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.task import Task
from rollyard.stages.sandbox import Sandbox

RULES: Final = Catalogue(
    "evaluation rule",
    "rollyard.evaluators",
    {
        "command": "rollyard.stages.evaluators.command:CommandRule",
        "contains": "rollyard.stages.evaluators.contains:Contains",
        "exact": "rollyard.stages.evaluators.exact:Exact",
        "none": "rollyard.stages.evaluators.none:NoReward",
        "numeric": "rollyard.stages.evaluators.numeric:Numeric",
        "python": "rollyard.stages.evaluators.python:PythonRule",
        "regex": "rollyard.stages.evaluators.regex:Regex",
    },
    TaskError,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of a rollout. None means that there is none, and is never replaced by 0."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalContext:
    """What a rule may look at. `sandbox` is as the agent left it; None when there is none."""

    task: Task
    result: AgentResult
    sandbox: Sandbox | None
    timeout_s: float


class Rule(Protocol):
    """One way to make a reward."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Raises TaskError that names the argument which is not acceptable."""
        ...

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when the rule does not work, SandboxError when the sandbox does not."""
        ...


class RuleArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of rules whose arguments are their fields. `__post_init__` may raise ValueError."""

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Raises TaskError."""
        try:
            return msgspec.convert(args, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$")
            known = ", ".join(cls.__struct_fields__) or "none"
            raise TaskError(f"evaluation.args{where.rstrip('`')}: {what}", hint=f"arguments are: {known}") from error


def open_rule(name: str, args: Mapping[str, Any]) -> Rule:
    """The rule of that name or dotted path. Raises TaskError for an unknown rule or an argument it does not take."""
    rule: Rule = RULES.load(name).from_args(args)
    return rule
