"""What a sandbox is: where one attempt's agent works. One backend a file in stages/sandboxes/.

Contract: docs/architecture.md section 8. A sandbox outlives the process that made it: whoever reaches its place opens
it from its `SandboxRef` and finds the processes that were started there. What every backend must do, case by case, is
the conformance kit: `rollyard sandbox check NAME`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

from msgspec import Struct

from rollyard.harnesses.harness import Command
from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import Limits, NetworkMode
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.shell import Shell

ANY_PLACE: Final = "any"
MAX_OUTPUT_BYTES: Final = 65_536
MAX_TREE_BYTES: Final = 1 << 30

BACKENDS: Final = Catalogue(
    "sandbox backend",
    "rollyard.sandboxes",
    {
        "apptainer": "rollyard.stages.sandboxes.apptainer:ApptainerBackend",
        "bubblewrap": "rollyard.stages.sandboxes.bubblewrap:BubblewrapBackend",
        "docker": "rollyard.stages.sandboxes.docker:DockerBackend",
        "e2b": "rollyard.stages.sandboxes.e2b:E2bBackend",
        "local": "rollyard.stages.sandboxes.local:LocalBackend",
        "none": "rollyard.stages.sandboxes.none:NoneBackend",
    },
    ConfigError,
)

EndReason = Literal["exited", "deadline", "lease", "killed", "memory", "lost"]
"""Why a process ended: by itself, at its deadline, since no worker renewed the lease, by `kill`, since the sandbox was
out of memory; or nobody knows."""

Base = Literal["work", "home"]


class Labels(Struct, frozen=True, kw_only=True):
    """Whose sandbox it is. Every sandbox carries them from before anything else is in it."""

    run: str
    rollout_id: str
    attempt: int
    owner: str  # name of the worker that made it
    created_ms: int  # Unix ms
    role: Literal["agent", "eval", "warm", "check"] = "agent"


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the worker's machine, seen read-only inside at the absolute path `target`."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What sandbox to make. `check_plan` says what a backend cannot do of it; `create` may rely on that check.

    `deadline_s` is the dead-man switch: so long after its creation the sandbox ends by itself, whatever happened to the
    workers; backends round it up. `network` is never "default" here.
    """

    image: str = ""
    workdir: str = ""
    user: str = ""
    network: NetworkMode = "open"
    allow_hosts: tuple[str, ...] = ()
    read_only: bool = False
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    deadline_s: float = 86_400.0


DEFAULT_PLAN: Final = Plan()


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


@dataclass(frozen=True, slots=True)
class Stats:
    """What a sandbox uses now. None: the backend cannot tell."""

    memory_bytes: int | None = None
    cpu_s: float | None = None  # since it was made
    processes: int | None = None
    disk_bytes: int | None = None  # written since it was made


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs from the image."""

    path: str  # absolute, inside
    kind: Literal["added", "modified", "deleted"]


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

    @property
    def gateway_url(self) -> str | None:
        """The gateway's base URL as seen inside, without path; None: its own address."""
        ...

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Base = "work") -> None:
        """Write files, replacing those that exist. Raises SandboxError that names a path which would leave `base`."""
        ...

    async def put_tree(self, archive: bytes | Path, target: str) -> None:
        """Unpack a tar archive, plain or gzip, below `target` (relative to `workdir`, or absolute), as the sandbox's
        user. Raises SandboxError for a member that would leave it."""
        ...

    async def get_tree(self, path: str, *, max_bytes: int = MAX_TREE_BYTES, exclude: Sequence[str] = ()) -> bytes:
        """A file or folder as a plain tar archive whose names start at `path`'s last part ("." for a folder's own
        content). `exclude` are tar patterns. Raises SandboxError when there is none, or it has over `max_bytes`."""
        ...

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """The first `max_bytes` of a regular file inside the sandbox; None: there is none."""
        ...

    async def exec(
        self,
        script_or_argv: str | tuple[str, ...],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        timeout_s: float,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run a shell script (by `sh`) or a program; what it leaves running is killed at its end.

        `cwd` is relative to the working directory, or absolute. A program that is not there gives exit code 127."""
        ...

    async def shell(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
    ) -> Shell:
        """A persistent shell: many commands a second, one after another, with one working directory and environment.

        It belongs to the calling process and ends with it. `tty` gives it a pseudo-terminal where the backend can."""
        ...

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Start a process that outlives the caller. False: `name` was started before, so attach with `wait`."""
        ...

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the end of `name`. When this returns, nothing that it started is left running."""
        ...

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The last `max_bytes` of the standard output and standard error of `name`, also while it runs."""
        ...

    async def kill(self, name: str) -> None:
        """Kill `name` and everything that it started. Does nothing when it ended or was never started."""
        ...

    async def snapshot(self) -> str:
        """Keep the sandbox's files as they are now; the name is an `image` for `create`. Capability `snapshots`."""
        ...

    async def diff(self) -> list[Change]:
        """Every path that differs from the image, sorted. Capability `diff`."""
        ...

    async def set_network(self, mode: NetworkMode, allow_hosts: Sequence[str] = ()) -> None:
        """Change what can be reached from inside. Capability `set_network`."""
        ...

    async def stats(self) -> Stats:
        """What it uses now."""
        ...

    async def close_channels(self) -> None:
        """Let go of what this process holds open. The sandbox lives on; the next call opens it again."""
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

    capabilities: Capabilities
    """What the backend can do, also as an attribute of the class, so that admit can ask without making one."""

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

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> Sandbox:
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
