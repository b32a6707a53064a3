"""Rule `none`: no reward."""

from __future__ import annotations

from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict


class NoReward(RuleArgs, frozen=True, kw_only=True):
    """For tasks whose rewards are made elsewhere."""

    async def reward(self, context: EvalContext) -> Verdict:
        """Always None."""
        return Verdict(None)
