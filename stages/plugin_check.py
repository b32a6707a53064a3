"""What only plug-ins know about a task: whether its harness, rule, backend, hooks and handler exist and take these
arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollyard.pipeline.config import Config
from rollyard.schemas.errors import ConfigError, RollyardError, TaskError
from rollyard.schemas.sandbox import Repository
from rollyard.schemas.task import Task
from rollyard.stages.capabilities import refusals
from rollyard.stages.checked_harness import open_checked
from rollyard.stages.evaluator import Rule, open_rule, rule_refusals
from rollyard.stages.handler import by_source, open_handler
from rollyard.stages.hook import hooks_of, open_hook
from rollyard.stages.patterns import check_pattern
from rollyard.stages.sandbox import BACKENDS

_URL = re.compile(r"(https?|ssh|git|file)://[^/\s-]|file:///|/|[A-Za-z0-9_.-]+@[A-Za-z0-9_.-]+:[^-]")


def check_task(task: Task) -> list[str]:
    """Texts `field: what is wrong (how to mend it)`; none when the task is fine."""
    problems: list[str] = []
    try:
        open_checked(task.agent.harness).validate_args(task.agent.args)
    except RollyardError as error:
        problems.append(_named("agent.harness", error))
    rule: Rule | None = None
    try:
        rule = open_rule(task.evaluation.rule, task.evaluation.args)
    except RollyardError as error:
        problems.append(_named("evaluation.rule", error))
    try:
        backend = BACKENDS.load(task.sandbox.backend)
        problems += refusals(task.sandbox.backend, backend.capabilities, task.sandbox)
        if rule is not None:
            problems += rule_refusals(rule, task.sandbox.backend, backend.capabilities)
    except RollyardError as error:
        problems.append(_named("sandbox.backend", error))
    return [*problems, *_around_the_run(task), *_repository(task.sandbox.repository)]


def check_configured(config: Config) -> None:
    """Raises ConfigError for hooks and handlers of the configuration that do not exist or do not take their arguments.

    A worker asks at its start, since it would fail every rollout otherwise.
    """
    for number, spec in enumerate(hooks_of(config, Task(prompt="-"))):
        try:
            open_hook(spec)
        except TaskError as error:
            raise ConfigError(f"worker.hooks[{number}]: {error.message}", hint=error.hint) from error
    for source, name in by_source(config).items():
        try:
            open_handler(name)
        except TaskError as error:
            raise ConfigError(f"worker.handlers: of {source!r}: {error.message}", hint=error.hint) from error


def _around_the_run(task: Task) -> Iterator[str]:
    for number, spec in enumerate(task.hooks):
        try:
            open_hook(spec)
        except RollyardError as error:
            yield f"hooks[{number}].{error}" if error.message.startswith("args") else f"hooks[{number}].hook: {error}"
    if task.handler:
        try:
            open_handler(task.handler)
        except RollyardError as error:
            yield _named("handler", error)
    for number, pattern in enumerate(task.outputs):
        if problem := check_pattern(pattern):
            yield f"outputs[{number}]: {problem}"


def _repository(repository: Repository | None) -> Iterator[str]:
    if repository is None:
        return
    for field in ("url", "mirror"):
        if (value := getattr(repository, field)) and not _URL.match(value):
            yield f"sandbox.repository.{field}: {value!r:.200} is neither a URL nor an absolute path; write one"
    if "\0" in repository.url + repository.mirror + repository.commit + repository.path:
        yield "sandbox.repository: a text holds a NUL character; remove it"
    if repository.commit.startswith("-"):
        yield f"sandbox.repository.commit: {repository.commit!r:.100} names no commit; write a hash, tag or branch"
    if repository.path and (problem := check_pattern(repository.path)):
        yield f"sandbox.repository.path: {problem}"


def _named(field: str, error: RollyardError) -> str:
    """The error with the field that it is about, where it does not name one itself."""
    part = field.partition(".")[0]
    return str(error) if error.message.startswith(f"{part}.") else f"{field}: {error}"
