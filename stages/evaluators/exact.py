"""Rule `exact`: 1 when the answer is an accepted one, else 0."""

from __future__ import annotations

from rollyard.stages.evaluator import EvalContext, Verdict
from rollyard.stages.evaluators.answers import Answers


class Exact(Answers, frozen=True, kw_only=True):
    """Compares whole texts."""

    async def reward(self, context: EvalContext) -> Verdict:
        """1.0 or 0.0."""
        return Verdict(float(self.comparable(context.result.answer) in self.accepted()))
