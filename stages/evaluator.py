"""What an evaluation rule is: how the reward of one rollout is made. One rule a file in stages/evaluators/."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final, Protocol, Self

import msgspec
from msgspec import Struct

from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import EvaluationError, TaskError
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
    """The reward of a rollout. None means that there is none, and is never replaced by 0.

    `turn_rewards` are those of the main agent's calls, in their order; a list that is too short or has None leaves
    calls without one. Raises EvaluationError when one is no finite number.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        try:
            rewards = tuple(None if each is None else finite(each) for each in self.turn_rewards)
        except TypeError as error:
            raise EvaluationError(f"turn_rewards: {error}", hint="give a list of finite numbers and None") from error
        object.__setattr__(self, "turn_rewards", rewards)


def finite(value: object) -> float:
    """The value as a number, numpy's too. Raises TypeError when it is none, or not finite."""
    with suppress(OverflowError):
        if isinstance(value, Real) and math.isfinite(number := float(value)):
            return number
    raise TypeError(f"{value!r:.50} is no finite number")


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
