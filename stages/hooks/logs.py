"""Hook `logs`: keeps more of the agent's output than RUN does by itself, and log files of its home."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollyard.schemas.rollout import AgentResult
from rollyard.stages.hook import HookArgs, HookContext
from rollyard.stages.hooks.found_files import add_found, check_patterns
from rollyard.stages.watch import AGENT


class LogCollector(HookArgs, kw_only=True):
    """Adds `stdout.log`, `stderr.log` and, below `home/`, the files that `paths` names."""

    max_bytes: Annotated[int, Meta(ge=1, le=32 << 20, description="bytes kept of the end of each stream")] = 4 << 20
    paths: Annotated[tuple[str, ...], Meta(description="patterns below the agent's home")] = ()
    max_file_bytes: Annotated[int, Meta(ge=1, le=32 << 20, description="bytes kept of the start of a file")] = 8 << 20

    def __post_init__(self) -> None:
        check_patterns(self.paths)

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Keep them, whatever came of the agent."""
        if context.sandbox is None:
            return
        stdout, stderr = await context.sandbox.output(AGENT, self.max_bytes)
        for name, data in (("stdout.log", stdout), ("stderr.log", stderr)):
            if data:
                context.add_file(name, data)
        await add_found(context, self.paths, "home", "home/", self.max_file_bytes)
