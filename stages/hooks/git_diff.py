"""Hook `git_diff`: keeps what the agent changed in its working directory, and counts it.

INIT keeps the state before the agent when this hook is configured; it works for a plain folder too, with git inside.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import AgentResult
from rollyard.stages.changes import working_diff
from rollyard.stages.collection import DIFF_NAME
from rollyard.stages.hook import HookArgs, HookContext, Veto


class GitDiff(HookArgs, kw_only=True):
    """Adds `changes.diff`, also an empty one, and the metrics diff_files, diff_added and diff_removed (lines)."""

    max_bytes: Annotated[int, Meta(ge=1, le=32 << 20, description="a larger diff counts as a failure")] = 8 << 20
    required: Annotated[bool, Meta(description="an agent that changed nothing has failed")] = False
    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="time limit of each call")] = 120.0

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Make the diff. Raises SandboxError when it cannot be made."""
        if context.sandbox is None:
            return
        diff = await working_diff(context.sandbox, max_bytes=self.max_bytes, timeout_s=self.timeout_s)
        if diff is None:
            raise SandboxError("there is no git in the sandbox, or the state before the agent is gone")
        context.add_file(DIFF_NAME, diff)
        files, added, removed = counts(diff)
        context.add_metric("diff_files", files)
        context.add_metric("diff_added", added)
        context.add_metric("diff_removed", removed)
        if self.required and not diff:
            raise Veto("agent", "the agent changed nothing in its working directory")


def counts(diff: bytes) -> tuple[int, int, int]:
    """(files, lines added, lines removed) of a git diff."""
    files = added = removed = 0
    within = False
    for line in diff.split(b"\n"):
        if line.startswith(b"diff --git "):
            files, within = files + 1, False
        elif line.startswith(b"@@ "):
            within = True
        elif within and line.startswith(b"+"):
            added += 1
        elif within and line.startswith(b"-"):
            removed += 1
    return files, added, removed
