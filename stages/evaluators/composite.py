"""Rule `composite`: the rewards of several rules made into one, by weights, with gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.stages.evaluator import (
    MAX_LOG_CHARS,
    Carry,
    EvalContext,
    Isolation,
    Rule,
    RuleArgs,
    Verdict,
    isolation_of,
    open_rule,
    reward_of,
)

Combine = Literal["mean", "sum", "product", "min", "max"]


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of several."""

    rule: Annotated[str, Meta(description="name of an evaluation rule")]
    args: Annotated[dict[str, Any], Meta(description="arguments of the rule")] = field(default_factory=dict)
    name: Annotated[str, Meta(description="of its reward; empty: the rule's")] = ""
    weight: Annotated[float, Meta(ge=0, description="its share of a mean or sum")] = 1.0
    gate: Annotated[
        float | None, Meta(description="with a reward below this the whole is 0, and later parts are not judged")
    ] = None

    def title(self) -> str:
        """The name of its reward."""
        return self.name or self.rule


class Composite(RuleArgs, frozen=True, kw_only=True):
    """Judges part after part. They share a sandbox, where any of them needs one: the strictest that they ask for.

    The named rewards are those of the parts, and of what the parts name below: `tests.speed`.
    """

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=32, description="the rules, judged in this order")]
    combine: Annotated[Combine, Meta(description="mean and sum are weighted, product, min and max are not")] = "mean"

    def __post_init__(self) -> None:
        titles = [part.title() for part in self.parts]
        if len(set(titles)) != len(titles):
            raise ValueError("two parts have the same name; give each a `name`")
        if self.combine == "mean" and not any(part.weight for part in self.parts):
            raise ValueError("all weights are 0")
        if len({getattr(rule, "carry", "work") for rule in self._with_sandbox()}) > 1:
            raise ValueError(
                "some parts judge in a sandbox with the agent's files, some in one without them; swe and code go "
                "together, and so do command and harbor"
            )

    def rules(self) -> list[Rule]:
        """The rules of the parts. Raises ValueError that names the part whose arguments are not acceptable."""
        opened: list[Rule] = []
        for number, part in enumerate(self.parts):
            try:
                opened.append(open_rule(part.rule, part.args))
            except TaskError as error:
                raise ValueError(f"parts[{number}]: {error}") from error
        return opened

    @property
    def isolation(self) -> Isolation:
        """The strictest of its parts."""
        kinds = {isolation_of(rule) for rule in self.rules()}
        return "fresh" if "fresh" in kinds else "same" if "same" in kinds else "none"

    @property
    def carry(self) -> Carry:
        """As all of its parts that run commands have it."""
        return next((getattr(rule, "carry", "work") for rule in self._with_sandbox()), "work")

    @property
    def drop(self) -> tuple[str, ...]:
        """What any part does not want."""
        return tuple(sorted({name for rule in self.rules() for name in getattr(rule, "drop", ())}))

    @property
    def copy(self) -> tuple[str, ...]:
        """What any part wants."""
        return tuple(sorted({path for rule in self.rules() for path in getattr(rule, "copy", ())}))

    @property
    def wants_diff(self) -> bool:
        """Whether any part does."""
        return any(getattr(rule, "wants_diff", False) for rule in self.rules())

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when a part does not work, or has no reward."""
        rewards: dict[str, float] = {}
        named: dict[str, float] = {}
        metrics: dict[str, float] = {}
        logs: list[str] = []
        gated = False
        turn_rewards: Sequence[float | None] = ()
        for number, (part, rule) in enumerate(zip(self.parts, self.rules(), strict=True)):
            title = part.title()
            own = replace(context, process=f"{context.process}-part{number}")
            verdict = await reward_of(rule, part.rule, own)
            if verdict.reward is None:
                raise EvaluationError(
                    f"the part {title!r} gives no reward", hint="leave it out of evaluation.args.parts"
                )
            rewards[title] = verdict.reward
            named |= {f"{title}.{name}": value for name, value in verdict.rewards.items()}
            metrics |= {f"{title}.{name}": value for name, value in verdict.metrics.items()}
            turn_rewards = turn_rewards or verdict.turn_rewards
            if verdict.log:
                logs.append(f"== {title}\n{verdict.log[-MAX_LOG_CHARS // len(self.parts) :]}")
            if part.gate is not None and verdict.reward < part.gate:
                gated = True
                metrics["gated"] = 1.0
                break
        total = 0.0 if gated else combined(self.combine, self.parts, rewards)
        return Verdict(total, metrics, turn_rewards, rewards | named, "\n".join(logs))

    def _with_sandbox(self) -> list[Rule]:
        return [rule for rule in self.rules() if isolation_of(rule) != "none"]


def combined(combine: Combine, parts: Sequence[Part], rewards: Mapping[str, float]) -> float:
    """One reward of those of all parts."""
    values = [rewards[part.title()] for part in parts]
    weights = [part.weight for part in parts]
    match combine:
        case "product":
            return math.prod(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case _:
            total = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
            return total if combine == "sum" else total / math.fsum(weights)
