"""Rollyard: tasks in, training samples out.

This is the public API for trainers. `import rollyard` is cheap: a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.pipeline.client import Client, SubmitReport, connect
    from rollyard.pipeline.progress import RunStatus
    from rollyard.pipeline.reader import Reader
    from rollyard.pipeline.results import GroupBatch
    from rollyard.pipeline.sync_client import SyncClient, SyncReader, connect_sync
    from rollyard.pipeline.taskfile import TaskFile, read_task_file
    from rollyard.schemas.alarm import Alarm
    from rollyard.schemas.errors import (
        BlobError,
        BusError,
        BusFull,
        ConfigError,
        Conflict,
        DecodeError,
        RollyardError,
        TaskError,
        TooLarge,
        WaitTimeout,
    )
    from rollyard.schemas.failure import Failure
    from rollyard.schemas.fleet import LlmServer
    from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
    from rollyard.schemas.policy import SamplePolicy
    from rollyard.schemas.sample import Delivery, Group, Sample, Timings
    from rollyard.schemas.sandbox import Limits, Repository, SandboxSpec, SetupStep
    from rollyard.schemas.task import AgentSpec, EvaluationSpec, HookSpec, Sampling, Task, Timeouts
    from rollyard.schemas.weights import WeightProgress, WeightReport

__version__ = "0.1.0"

__all__ = [
    "AgentSpec",
    "Alarm",
    "BlobError",
    "BusError",
    "BusFull",
    "Client",
    "ConfigError",
    "Conflict",
    "DecodeError",
    "Delivery",
    "EvaluationSpec",
    "Failure",
    "Group",
    "GroupBatch",
    "HookSpec",
    "Limits",
    "LlmServer",
    "Logprobs",
    "LossMask",
    "Reader",
    "Repository",
    "RollyardError",
    "RunStatus",
    "Sample",
    "SamplePolicy",
    "Sampling",
    "SandboxSpec",
    "SetupStep",
    "SubmitReport",
    "SyncClient",
    "SyncReader",
    "Task",
    "TaskError",
    "TaskFile",
    "Timeouts",
    "Timings",
    "TokenIds",
    "TooLarge",
    "Versions",
    "WaitTimeout",
    "WeightProgress",
    "WeightReport",
    "__version__",
    "connect",
    "connect_sync",
    "read_task_file",
]

_HOMES = {
    "pipeline.client": ("Client", "SubmitReport", "connect"),
    "pipeline.progress": ("RunStatus",),
    "pipeline.reader": ("Reader",),
    "pipeline.results": ("GroupBatch",),
    "pipeline.sync_client": ("SyncClient", "SyncReader", "connect_sync"),
    "pipeline.taskfile": ("TaskFile", "read_task_file"),
    "schemas.alarm": ("Alarm",),
    "schemas.errors": (
        "BlobError",
        "BusError",
        "BusFull",
        "ConfigError",
        "Conflict",
        "DecodeError",
        "RollyardError",
        "TaskError",
        "TooLarge",
        "WaitTimeout",
    ),
    "schemas.failure": ("Failure",),
    "schemas.fleet": ("LlmServer",),
    "schemas.packed": ("Logprobs", "LossMask", "TokenIds", "Versions"),
    "schemas.policy": ("SamplePolicy",),
    "schemas.sample": ("Delivery", "Group", "Sample", "Timings"),
    "schemas.sandbox": ("Limits", "Repository", "SandboxSpec", "SetupStep"),
    "schemas.task": ("AgentSpec", "EvaluationSpec", "HookSpec", "Sampling", "Task", "Timeouts"),
    "schemas.weights": ("WeightProgress", "WeightReport"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
