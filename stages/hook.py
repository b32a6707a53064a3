"""What a hook is: code of the user's own around the agent's run. One shipped hook a file in stages/hooks/.

A hook is an object with any of these methods, sync or async:

    setup(context)              before anything else, in every process that takes the rollout
    before_run(context)         before the agent is started; never again in the attempt once all of them are through
    during_run(context)         async only: goes on while the agent runs, and is cancelled at its end
    after_run(context, result)  the agent has ended, in whatever way
    on_error(context, failure)  the attempt ends as failed or cancelled
    cleanup(context)            always, also when the process stops while the agent runs on

`setup`, `before_run`, `after_run` and `on_error` go through the hooks in their order, `cleanup` backwards. One object
serves one rollout in one process. After a worker's death the next one makes it anew; `after_run` may come twice.
docs/hooks.md tells it for users.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta, Struct

from rollyard.pipeline.config import Config
from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.errors import TaskError
from rollyard.schemas.failure import Failure, FailureClass
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.task import HookSpec, Task
from rollyard.stages.evaluator import finite
from rollyard.stages.sandbox import Sandbox

HOOKS: Final = Catalogue(
    "hook",
    "rollyard.hooks",
    {
        "artifacts": "rollyard.stages.hooks.artifacts:ArtifactSaver",
        "command_audit": "rollyard.stages.hooks.command_audit:CommandAudit",
        "git_diff": "rollyard.stages.hooks.git_diff:GitDiff",
        "logs": "rollyard.stages.hooks.logs:LogCollector",
        "resources": "rollyard.stages.hooks.resources:Resources",
        "wall_clock": "rollyard.stages.hooks.wall_clock:WallClock",
        "webhook": "rollyard.stages.hooks.webhook:Webhook",
    },
    TaskError,
)
STEPS: Final = ("setup", "before_run", "during_run", "after_run", "on_error", "cleanup")
DEFAULT_TIMEOUT_S: Final = 60.0
MAX_METADATA_BYTES: Final = 16_384
MAX_FILE_BYTES: Final = 64 << 20


class Veto(Exception):
    """Raised by `before_run` or `after_run`: the attempt ends with this failure, whatever the hook's policy."""

    def __init__(self, kind: FailureClass, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.failure = Failure.of(kind, message, hint)


@dataclass(slots=True, kw_only=True)
class HookContext:
    """What one hook knows about one attempt, and where it puts what it finds."""

    task: Task
    rollout: Rollout
    attempt: int
    worker: str
    sandbox: Sandbox | None  # None: the backend has none
    attached: bool = False  # the agent was started by a worker that is gone
    started_ms: int = 0  # when the agent was started, Unix ms; 0: not yet
    result: AgentResult | None = None  # from after_run on, with what hooks before this one added
    failure: Failure | None = None  # why the attempt does not complete, as far as it is known
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    end_agent: Callable[[str], Awaitable[None]] | None = None
    """Of `during_run`: ends the agent; the rollout is truncated, class agent_budget, for that reason."""
    read_calls: Callable[[], Awaitable[list[CallIntent | CallEnd]]] | None = None
    read_progress: Callable[[], Awaitable[dict[str, float]]] | None = None  # None: the agent has no process
    closed: bool = False

    def add_metric(self, name: str, value: float) -> None:
        """Add a number to the result. Raises TypeError for one that is not finite."""
        self._check_open()
        self.metrics[name] = finite(value)

    def add_metadata(self, name: str, value: Any) -> None:
        """Add a plain value to the result. Raises ValueError when all of the hook's have over 16 KB."""
        self._check_open()
        if len(msgspec.json.encode({**self.metadata, name: value})) > MAX_METADATA_BYTES:
            raise ValueError(f"the metadata of a hook has over {MAX_METADATA_BYTES:,} bytes; add a file instead")
        self.metadata[name] = value

    def add_file(self, name: str, data: bytes) -> None:
        """Keep a file as an artifact. Raises ValueError when all of the hook's have over 64 MiB."""
        self._check_open()
        if sum(map(len, self.files.values())) + len(data) > MAX_FILE_BYTES:
            raise ValueError(f"the files of a hook have over {MAX_FILE_BYTES:,} bytes")
        self.files[name] = bytes(data)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this call took longer than its time limit; nothing more is added")


class HookArgs(Struct, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Base of hooks whose arguments are their fields. `__post_init__` may raise ValueError."""

    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="time limit of each call")] = DEFAULT_TIMEOUT_S

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Raises TaskError that names the argument."""
        try:
            return msgspec.convert(args, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$")
            raise TaskError(f"args{where.rstrip('`')}: {what}", hint=f"arguments are: {known_args(cls)}") from error


def known_args(kind: type[Struct]) -> str:
    """The arguments of a class, as a list for people."""
    return ", ".join(kind.__struct_fields__) or "none"


def hooks_of(config: Config, task: Task) -> tuple[HookSpec, ...]:
    """The hooks of a task in their order: those of the configuration, then its own."""
    common = (HookSpec(hook=each) if isinstance(each, str) else each for each in config.worker.hooks)
    return (*common, *task.hooks)


def open_hook(spec: HookSpec) -> Any:
    """A new hook object: by `from_args(args)`, or by the class with them as keyword arguments. Raises TaskError."""
    kind = HOOKS.load(spec.hook)
    try:
        hook = kind.from_args(spec.args) if hasattr(kind, "from_args") else kind(**spec.args)
    except TaskError:
        raise
    except Exception as error:  # the boundary: the user's own code
        raise TaskError(f"args: the hook {spec.hook!r} does not take them: {error}") from error
    steps = [step for step in STEPS if callable(getattr(hook, step, None))]
    if not steps:
        raise TaskError(f"{spec.hook!r} is no hook", hint=f"give the class one of the methods {', '.join(STEPS)}")
    if "during_run" in steps and not inspect.iscoroutinefunction(hook.during_run):
        raise TaskError(f"during_run of the hook {spec.hook!r} is not async", hint="write async def")
    return hook
