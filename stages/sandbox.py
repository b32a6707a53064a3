"""What a sandbox is: where one attempt's agent works. One backend a file in stages/sandboxes/.

Contract: docs/architecture.md section 8. A sandbox outlives the process that made it: whoever reaches its place opens
it from its `SandboxRef` and finds the processes that were started there.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

from msgspec import Struct

from rollyard.harnesses.harness import Command
from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef

ANY_PLACE: Final = "any"

BACKENDS: Final = Catalogue(
    "sandbox backend",
    "rollyard.sandboxes",
    {"local": "rollyard.stages.sandboxes.local:LocalBackend", "none": "rollyard.stages.sandboxes.none:NoneBackend"},
    ConfigError,
)

EndReason = Literal["exited", "deadline", "lease", "killed", "lost"]
"""Why a process ended: by itself, at its deadline, since no worker renewed the lease, by `kill`; or nobody knows."""


class Labels(Struct, frozen=True, kw_only=True):
    """Whose sandbox it is. Every sandbox carries them from before anything else is in it."""

    run: str
    rollout_id: str
    attempt: int
    owner: str  # name of the worker that made it
    created_ms: int  # Unix ms


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a short command left behind. Output is the last `max_output_bytes` of each stream."""

    exit_code: int | None  # negative: killed by that signal; None: unknown
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended. `exit_code` is negative when a signal killed it, None when it is not known."""

    exit_code: int | None
    reason: EndReason


class Sandbox(Protocol):
    """One sandbox. Relative paths start at `workdir`. Every method raises SandboxError when the sandbox is gone."""

    @property
    def ref(self) -> SandboxRef:
        """What another process needs to open it."""
        ...

    @property
    def home(self) -> str:
        """The agent's home as seen inside, absolute."""
        ...

    @property
    def workdir(self) -> str:
        """The working directory as seen inside, absolute."""
        ...

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Literal["work", "home"] = "work") -> None:
        """Write files, replacing those that exist. Raises SandboxError that names a path which would leave `base`."""
        ...

    async def exec(
        self,
        script_or_argv: str | tuple[str, ...],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        max_output_bytes: int = 65_536,
    ) -> ExecResult:
        """Run a shell script or a program in the working directory; what it leaves running is killed at its end."""
        ...

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Start a process that outlives the caller. False: `name` was started before, so attach with `wait`."""
        ...

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the end of `name`. When this returns, nothing that it started is left running."""
        ...

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The last `max_bytes` of the standard output and standard error of `name`."""
        ...

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """The first `max_bytes` of a regular file inside the sandbox; None: there is none."""
        ...

    async def kill(self, name: str) -> None:
        """Kill `name` and everything that it started. Does nothing when it ended or was never started."""
        ...

    async def destroy(self) -> None:
        """Kill what runs and remove everything. Does nothing when the sandbox is gone."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind. An async context manager; leaving it ends no sandbox."""

    @property
    def name(self) -> str:
        """The name by which tasks ask for it."""
        ...

    @property
    def place(self) -> str:
        """From where its sandboxes can be reached."""
        ...

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Raises ConfigError that names the setting which is not acceptable."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def reaches(self, place: str) -> bool:
        """Whether this worker can open sandboxes of that place."""
        ...

    async def create(self, labels: Labels) -> Sandbox:
        """Make a sandbox. Raises SandboxError."""
        ...

    async def open(self, ref: SandboxRef) -> Sandbox:
        """A sandbox that exists, or existed. Raises SandboxError for one of another place."""
        ...

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """All sandboxes of this place, whoever made them."""
        ...

    async def renew_lease(self) -> None:
        """Say that a worker lives. To be called every few seconds, else sandboxes of this place end themselves."""
        ...


def open_backend(name: str, settings: Mapping[str, Any] | None = None) -> SandboxBackend:
    """The backend of that name or dotted path; enter it with `async with`. Raises ConfigError."""
    backend: SandboxBackend = BACKENDS.load(name).from_settings(settings or {})
    return backend


def check_path(path: str) -> str:
    """A relative path of a file, normalised. Raises SandboxError for one that leaves the folder or names no file."""
    normal = posixpath.normpath(path) if path else "."
    if path.startswith("/") or normal == ".." or normal.startswith("../"):
        raise SandboxError(f"the path {path!r} leaves the sandbox", hint="use a path inside the working directory")
    if normal == "." or path.endswith("/") or "\0" in path:
        raise SandboxError(f"the path {path!r} names no file", hint="write for example 'src/main.py'")
    return normal
