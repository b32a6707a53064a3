"""Rule `numeric`: 1 when a number in the answer is near enough to the accepted one, else 0."""

from __future__ import annotations

import math
import re
from typing import Annotated, Final, Literal

from msgspec import Meta

from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict

_NUMBER: Final = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?(?!\w)")


class Numeric(RuleArgs, frozen=True, kw_only=True):
    """Compares the last, first or any number of the answer with `answer`."""

    answer: Annotated[float, Meta(description="the accepted number")]
    tolerance: Annotated[float, Meta(ge=0, description="largest absolute difference")] = 1e-6
    relative: Annotated[float, Meta(ge=0, description="largest difference as a share of `answer`")] = 0.0
    which: Annotated[Literal["last", "first", "any"], Meta(description="which number of the answer counts")] = "last"

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) for number in (self.answer, self.tolerance, self.relative)):
            raise ValueError("numbers must be finite")

    async def reward(self, context: EvalContext) -> Verdict:
        """1.0 or 0.0; 0.0 also when there is no number."""
        numbers = numbers_in(context.result.answer)
        counted = {"last": numbers[-1:], "first": numbers[:1], "any": numbers}[self.which]
        allowed = max(self.tolerance, self.relative * abs(self.answer))
        return Verdict(float(any(abs(number - self.answer) <= allowed for number in counted)))


def numbers_in(text: str) -> list[float]:
    """Decimal numbers of a text, in order; 1,234.5 and 1e3 are numbers."""
    return [float(match.group().replace(",", "")) for match in _NUMBER.finditer(text)]
