"""What a task wants to be kept of an agent's work, so that INIT prepares for it and RUN collects it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollyard.schemas.task import HookSpec, Task
from rollyard.stages.evaluator import RULES

GIT_DIFF: Final = "git_diff"


def wants_diff(task: Task, hooks: Sequence[HookSpec]) -> bool:
    """Whether anybody looks at what changed in the working directory.

    So does a task with a repository, the hook `git_diff`, `evaluation.skip` with empty_diff, and a rule whose class
    sets `wants_diff`. Raises TaskError for an unknown rule.
    """
    if task.sandbox.repository is not None or "empty_diff" in task.evaluation.skip:
        return True
    if any(spec.hook == GIT_DIFF for spec in hooks):
        return True
    return bool(getattr(RULES.load(task.evaluation.rule), "wants_diff", False))
