"""A handler: a class of the user's own that does the work of stages itself, for a task or for a source of data.

It may have `init(context)`, `run(context)` and `eval(context)`, sync or async, and takes the place of the work of the
stages whose names it has. The stages' rules hold around it: time limits, failure classes, cancels, heartbeats, and that
a call may come again after a worker's death. One object serves all rollouts of a process.

    init -> what `run` and `eval` find in `context.carried`: plain values, at most 8 KB
    run  -> an AgentResult, its fields as a dict, an answer, or None
    eval -> a Verdict, its fields as a dict, a number, or None for no reward
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import msgspec

from rollyard.pipeline.config import Config
from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import ConfigError, RollyardError, TaskError
from rollyard.schemas.failure import Failure, FailureClass
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.task import Task
from rollyard.stages.bounded import call
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageFailed

HANDLERS: Final = Catalogue("handler", "rollyard.handlers", {}, TaskError)
MAX_CARRIED_BYTES: Final = 8_192

StepName = Literal["init", "run", "eval"]
STEPS: Final[tuple[StepName, ...]] = ("init", "run", "eval")
_CLASSES: Final[dict[StepName, FailureClass]] = {"init": "init", "run": "agent", "eval": "eval"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerContext:
    """What a handler is told about one attempt. `default` does the stage's own work and gives what it gives."""

    task: Task
    rollout: Rollout
    attempt: int
    base_url: str  # of the gateway as the sandbox sees it, with /v1
    api_key: str  # of the attempt's session; empty in `eval`, and for a harness that starts no process
    sandbox: Sandbox | None  # None: the backend has none
    carried: Any = None  # what `init` returned
    result: AgentResult | None = None  # of `eval`: what RUN found
    timeout_s: float = 0.0  # the limit of the stage
    default: Callable[[], Awaitable[Any]] | None = None


class Handler:
    """One handler. Raises TaskError when the object has none of the three methods."""

    def __init__(self, name: str, target: object) -> None:
        self.name = name
        self._calls: dict[StepName, Callable[..., Any]] = {}
        for step in STEPS:
            if callable(function := getattr(target, step, None)):
                self._calls[step] = function
        if not self._calls:
            raise TaskError(f"handler: {name!r} has none of init, run and eval", hint="give the class one of them")

    def has(self, step: StepName) -> bool:
        """Whether it does the work of that stage."""
        return step in self._calls

    async def call(self, step: StepName, context: HandlerContext, timeout_s: float) -> Any:
        """What its method returns. Raises TimeoutError, StageFailed of the stage's class, RollyardError."""
        try:
            return await call(self._calls[step], context, timeout_s=timeout_s)
        except (TimeoutError, StageFailed, RollyardError):
            raise
        except Exception as error:  # the boundary: the user's own code
            said = f"{type(error).__name__}: {error}"[:1_500]
            raise StageFailed(
                Failure.of(_CLASSES[step], f"{step} of the handler {self.name!r} raised {said}")
            ) from error


@cache
def open_handler(name: str) -> Handler:
    """The handler at a dotted path, or of an entry point. Raises TaskError."""
    made = HANDLERS.load(name)
    try:
        return Handler(name, made() if isinstance(made, type) else made)
    except TaskError:
        raise
    except Exception as error:  # the boundary: the user's own code
        raise TaskError(f"handler: {name!r} cannot be made: {error!r}", hint="its class takes no arguments") from error


def find_handler(config: Config, task: Task) -> Handler | None:
    """The task's handler, else that of its source of data, else None. Raises TaskError, ConfigError."""
    name = task.handler or by_source(config).get(task.data_source, "")
    return open_handler(name) if name else None


def by_source(config: Config) -> dict[str, str]:
    """Handlers by source of data, as [worker] handlers says. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in config.worker.handlers:
        source, equals, name = text.partition("=")
        if not equals or not source.strip() or ":" not in name:
            raise ConfigError(
                f"worker.handlers: {text!r} is no handler of a source", hint="write source=package.module:Class"
            )
        found[source.strip()] = name.strip()
    return found


def carried(value: Any) -> Any:
    """What `init` returned, as it will be read back. Raises StageFailed of class init for what cannot be kept."""
    try:
        data = msgspec.json.encode(value)
        if len(data) <= MAX_CARRIED_BYTES:
            return msgspec.json.decode(data)
        problem = f"has {len(data):,} bytes, the limit is {MAX_CARRIED_BYTES:,}"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"cannot be kept: {error}"
    hint = "return plain values, and put large ones into the sandbox"
    raise StageFailed(Failure.of("init", f"what init of the handler returned {problem}", hint))


def as_result(value: Any) -> AgentResult:
    """What `run` returned, as a result. Raises StageFailed of class agent."""
    if isinstance(value, AgentResult):
        return value
    if value is None or isinstance(value, str):
        return AgentResult(exit_code=0, answer=value or "")
    try:
        fields = {"exit_code": 0, **value} if isinstance(value, Mapping) else value
        return msgspec.convert(fields, AgentResult)
    except (msgspec.ValidationError, TypeError) as error:
        hint = "return an AgentResult, a dict of its fields, an answer or None"
        raise StageFailed(
            Failure.of("agent", f"what run of the handler returned is no result: {error}", hint)
        ) from error
