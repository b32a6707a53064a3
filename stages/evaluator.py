"""What an evaluation rule is: how the reward of one rollout is made. One rule a file in stages/evaluators/."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Final, Literal, Protocol, Self, get_args

import msgspec
from msgspec import Struct

from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.task import EvaluationSpec, Task
from rollyard.stages.boundary import boundary, outcome
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import Sandbox

RULES: Final = Catalogue(
    "evaluation rule",
    "rollyard.evaluators",
    {
        "choice": "rollyard.stages.evaluators.choice:Choice",
        "code": "rollyard.stages.evaluators.code:Code",
        "command": "rollyard.stages.evaluators.command:CommandRule",
        "composite": "rollyard.stages.evaluators.composite:Composite",
        "contains": "rollyard.stages.evaluators.contains:Contains",
        "exact": "rollyard.stages.evaluators.exact:Exact",
        "harbor": "rollyard.stages.evaluators.harbor:Harbor",
        "llm_judge": "rollyard.stages.evaluators.llm_judge:LlmJudge",
        "math": "rollyard.stages.evaluators.math:Math",
        "none": "rollyard.stages.evaluators.none:NoReward",
        "numeric": "rollyard.stages.evaluators.numeric:Numeric",
        "python": "rollyard.stages.evaluators.python:PythonRule",
        "regex": "rollyard.stages.evaluators.regex:Regex",
        "swe": "rollyard.stages.evaluators.swe:Swe",
    },
    TaskError,
)

Isolation = Literal["none", "same", "fresh"]
"""Where the commands of a rule run: it has none; in the agent's own sandbox; in a fresh one of the same kind."""

Carry = Literal["work", "nothing"]
"""What a fresh sandbox gets of the agent's: its working directory in the place of the task's own, or nothing."""

MAIN_REWARD: Final = "reward"
MAX_LOG_CHARS: Final = 16_384
_HINT: Final = (
    "mend the rule, or let it raise EvaluationError with words of its own; the worker's log has the traceback"
)

_VERDICT_FIELDS: Final = frozenset({"reward", "metrics", "turn_rewards", "rewards", "log"})


class EvaluationHopeless(EvaluationError):
    """A rule that cannot work on this rollout, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of a rollout. None means that there is none, and is never replaced by 0.

    `turn_rewards` are those of the main agent's calls, in their order; a list that is too short or has None leaves
    calls without one. `rewards` are the named parts from which the reward was made, `log` the end of what the verifier
    wrote, for people. Raises EvaluationError when a number is not finite.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float | None] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    log: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        try:
            turns = tuple(None if each is None else finite(each) for each in self.turn_rewards)
        except TypeError as error:
            raise EvaluationError(f"turn_rewards: {error}", hint="give a list of finite numbers and None") from error
        object.__setattr__(self, "turn_rewards", turns)
        object.__setattr__(self, "log", self.log[-MAX_LOG_CHARS:])

    @classmethod
    def of(
        cls, rewards: Mapping[str, float], main: str = "", *, metrics: Mapping[str, float] | None = None, log: str = ""
    ) -> Verdict:
        """The verdict of named rewards: see `scalar`. Raises EvaluationError."""
        return cls(scalar(rewards, main), metrics or {}, (), dict(rewards), log)


def as_verdict(value: object, who: str) -> Verdict:
    """What code of the user's returned as a verdict: one, its fields as a dict, a number, or None for no reward.

    Raises EvaluationError that names `who` returned it.
    """
    try:
        if isinstance(value, Verdict):
            return replace(
                value,
                reward=None if value.reward is None else finite(value.reward),
                metrics=_numbers(value.metrics),
                rewards=_numbers(value.rewards),
            )
        if not isinstance(value, Mapping):
            return Verdict(None if value is None else finite(value))
        known = {name: each for name, each in value.items() if name in _VERDICT_FIELDS}
        if unknown := sorted(map(str, value.keys() - known.keys())):
            raise TypeError(f"there is no field {', '.join(unknown)} in a verdict")
        named = {name: _numbers(known.get(name)) for name in ("metrics", "rewards")}
        reward = known.get("reward", scalar(named["rewards"]) if named["rewards"] else None)
        return Verdict(
            None if reward is None else finite(reward),
            named["metrics"],
            known.get("turn_rewards") or (),
            named["rewards"],
            str(known.get("log") or ""),
        )
    except (TypeError, EvaluationError) as error:
        said = error.message if isinstance(error, EvaluationError) else error
        raise EvaluationError(
            f"{who} returned {value!r:.200}: {said}", hint="return a Verdict, a dict of its fields, a number or None"
        ) from error


def _numbers(value: object) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.50} is no mapping of names to numbers")
    return {str(name): finite(number) for name, number in value.items()}


def scalar(rewards: Mapping[str, float], main: str = "") -> float:
    """One reward of named ones: that called `main`; without a name that called `reward`, else the mean of all.

    Raises EvaluationError when there is none of that name, or none at all.
    """
    if not rewards:
        raise EvaluationError("there are no rewards", hint='write at least {"reward": NUMBER}')
    if main and main not in rewards:
        raise EvaluationError(f"there is no reward {main!r}, only {', '.join(sorted(rewards))}")
    if main or MAIN_REWARD in rewards:
        return rewards[main or MAIN_REWARD]
    return math.fsum(rewards.values()) / len(rewards)


def finite(value: object) -> float:
    """The value as a number, numpy's too. Raises TypeError when it is none, or not finite."""
    with suppress(OverflowError):
        if isinstance(value, Real) and math.isfinite(number := float(value)):
            return number
    raise TypeError(f"{value!r:.50} is no finite number")


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """The way to a model for a rule that asks one: calls of a session of their own, which nobody trains on."""

    base_url: str  # of the gateway, with /v1
    key_for: Callable[[str], str]  # the API key for a served model


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalContext:
    """What a rule may look at and use.

    `sandbox` is where its commands run, by its isolation; `agent` the one that the agent left, to be read. They are
    one in the isolations `none` and `same`, and None when there is none. `process` is the name under which a rule
    starts its command, so that a second evaluation after a death attaches to it.
    """

    task: Task
    result: AgentResult
    sandbox: Sandbox | None
    timeout_s: float
    agent: Sandbox | None = None
    isolation: Isolation = "same"
    capabilities: Capabilities = Capabilities()
    process: str = "eval"
    judge: JudgeAccess | None = None
    diff: Callable[[], Awaitable[bytes | None]] | None = None
    """What the agent changed, as git prints it; None: nobody can tell."""

    def place(self, rule: str) -> Sandbox:
        """The sandbox in which to run commands. Raises EvaluationError when there is none."""
        if self.sandbox is None:
            raise EvaluationHopeless(f"the rule `{rule}` needs a sandbox", hint="choose another rule or backend")
        return self.sandbox


class Rule(Protocol):
    """One way to make a reward.

    It may have an attribute `isolation` (`Isolation`, "none" where it is missing), `carry` (`Carry`, "work" where it is
    missing) and `drop`, names of files that are not carried, as shell patterns.
    """

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
    """The rule of that name or dotted path.

    Raises TaskError for an unknown rule, an argument it does not take, and one of the user's own that cannot be made.
    """
    with boundary(
        f"evaluation.rule: from_args of {name!r}", TaskError, "let it raise TaskError that names the argument"
    ):
        rule: Rule = RULES.load(name).from_args(args)
        isolation = isolation_of(rule)
    if not callable(getattr(rule, "reward", None)):
        raise TaskError(
            f"evaluation.rule: {name!r} is no rule: from_args returned {rule!r:.100}",
            hint="let it return an object with `async reward(context)`",
        )
    if isolation not in get_args(Isolation):
        raise TaskError(
            f"evaluation.rule: the isolation of {name!r} is {isolation!r:.50}",
            hint=f"it is one of {', '.join(get_args(Isolation))}",
        )
    return rule


async def reward_of(rule: Rule, name: str, context: EvalContext, *, timeout_s: float | None = None) -> Verdict:
    """What a rule says, as a verdict: see `as_verdict`.

    Raises TooSlow after `timeout_s`, None: never; EvaluationError for whatever a rule of the user's own raises, and for
    what is no verdict; RollyardError.
    """
    who = f"reward of the rule {name!r}"
    with boundary(who, EvaluationError, _HINT):
        return as_verdict(await outcome(rule.reward, context, timeout_s=timeout_s), who)


def isolation_of(rule: Rule, spec: EvaluationSpec | None = None) -> Isolation:
    """Where the commands of a rule run: as the task says, else as the rule does."""
    own: Isolation = getattr(rule, "isolation", "none")
    if own == "none" or spec is None or spec.sandbox == "auto":
        return own
    return spec.sandbox


def rule_refusals(rule: Rule, backend: str, capabilities: Capabilities) -> list[str]:
    """Texts `field: what the backend lacks; what to do`; none when the rule can work there."""
    if isolation_of(rule) != "none" and not capabilities.processes:
        return [f"evaluation.rule: it runs commands, and the backend {backend!r} has no place for them; choose another"]
    return []
