"""Hook `artifacts`: keeps files that the agent made. For all tasks of a worker; a task's own stand in `outputs`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rollyard.schemas.rollout import AgentResult
from rollyard.stages.hook import HookArgs, HookContext
from rollyard.stages.hooks.found_files import add_found, check_patterns


class ArtifactSaver(HookArgs, kw_only=True):
    """Adds every regular file that a pattern names, under its path."""

    paths: Annotated[tuple[str, ...], Meta(min_length=1, description="patterns, such as out/**/*.json")]
    base: Annotated[Literal["work", "home"], Meta(description="below which folder")] = "work"
    max_file_bytes: Annotated[int, Meta(ge=1, le=32 << 20, description="bytes kept of the start of a file")] = 8 << 20
    only_completed: Annotated[bool, Meta(description="nothing of an agent that failed")] = False

    def __post_init__(self) -> None:
        check_patterns(self.paths)

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Keep them."""
        if context.sandbox is None or (self.only_completed and context.failure is not None):
            return
        prefix = "home/" if self.base == "home" else ""
        await add_found(context, self.paths, self.base, prefix, self.max_file_bytes)
