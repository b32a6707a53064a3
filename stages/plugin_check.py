"""What only plug-ins know about a task: whether its harness, rule and backend exist and take these arguments."""

from __future__ import annotations

from rollyard.harnesses.harness import open_harness
from rollyard.schemas.errors import RollyardError
from rollyard.schemas.task import Task
from rollyard.stages.capabilities import refusals
from rollyard.stages.evaluator import open_rule
from rollyard.stages.sandbox import BACKENDS


def check_task(task: Task) -> list[str]:
    """Texts `field: what is wrong (how to mend it)`; none when the task is fine."""
    problems: list[str] = []
    try:
        open_harness(task.agent.harness).validate_args(task.agent.args)
    except RollyardError as error:
        problems.append(_named("agent.harness", error))
    try:
        open_rule(task.evaluation.rule, task.evaluation.args)
    except RollyardError as error:
        problems.append(_named("evaluation.rule", error))
    try:
        backend = BACKENDS.load(task.sandbox.backend)
        problems += refusals(task.sandbox.backend, backend.capabilities, task.sandbox)
    except RollyardError as error:
        problems.append(_named("sandbox.backend", error))
    return problems


def _named(field: str, error: RollyardError) -> str:
    """The error with the field that it is about, where it does not name one itself."""
    part = field.partition(".")[0]
    return str(error) if error.message.startswith(f"{part}.") else f"{field}: {error}"
