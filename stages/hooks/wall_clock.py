"""Hook `wall_clock`: ends the agent after some time, also after a worker's death, without a failed rollout.

Unlike timeouts.run_s it may be set for all tasks of a worker, and says so while the agent runs.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from rollyard.schemas.rollout import AgentResult
from rollyard.stages.hook import HookArgs, HookContext
from rollyard.stages.stage import now_ms


class WallClock(HookArgs, kw_only=True):
    """The rollout goes on to EVAL as truncated, class agent_budget. Adds the metric wall_s."""

    limit_s: Annotated[float, Meta(gt=0, le=7 * 86_400, description="seconds from the agent's start")]

    async def during_run(self, context: HookContext) -> None:
        """Wait, then end the agent."""
        left_s = self.limit_s - (now_ms() - context.started_ms) / 1000
        await asyncio.sleep(max(left_s, 0.0))
        if context.end_agent is not None:
            await context.end_agent(f"the hook wall_clock ended the agent after {self.limit_s:g} s")

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Say how long it took."""
        if context.started_ms:
            context.add_metric("wall_s", (now_ms() - context.started_ms) / 1000)
