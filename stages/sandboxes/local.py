"""Sandbox backend `local`: a folder and a process group of its own on this machine.

It isolates nothing: an agent can do whatever the worker's user can do. It keeps honest agents apart, gives them a
scrubbed environment, and ends them with everything that they started.

    <root>/lease                            renewed by workers; shims end their agents when it is not
    <root>/<rollout>.<attempt>.<nonce>/     one sandbox
        labels.json  home/  work/  tmp/
        control/<name>/                     one process: see shim.sh

Caps on output: RLIMIT_FSIZE bounds every file that an agent writes, its standard output and error among them, at
`max_file_bytes`; whoever reads output gets the end of it, as long as they ask for.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.subjects import digest
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import DEFAULT_PLAN, ExecResult, Labels, Plan, ProcessEnd, check_path
from rollyard.stages.sandboxes.files import read_inside, remove_tree, tail, write_files
from rollyard.stages.sandboxes.marked import VARIABLE, MarkedProcesses
from rollyard.stages.sandboxes.settings import BackendSettings
from rollyard.stages.sandboxes.shim import Children, Shim, ShimSettings

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MIN_POLL_S: Final = 0.02
MAX_POLL_S: Final = 0.25

_FOLDER: Final = re.compile(r"(?P<rollout>[A-Za-z0-9_-]+)\.(?P<attempt>\d+)\.(?P<nonce>[0-9a-f]{16})\Z")
_PROCESS: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# A shell stands between us and the agent, and sets these itself.
_SHELL_VARIABLES: Final = frozenset({"IFS", "OLDPWD", "OPTIND", "PPID", "PWD", "SHLVL", "_", VARIABLE})
_GONE: Final = ".gone"


class LocalSettings(BackendSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the backend `local`."""

    max_file_bytes: Annotated[int, Meta(ge=512, description="bytes that one file of an agent may have")] = 256 << 20
    path: Annotated[str, Meta(description="PATH inside sandboxes")] = PATH


class LocalBackend:
    """Makes sandboxes under `settings.root`. Raises SandboxError when that folder cannot be written."""

    name = "local"
    capabilities = Capabilities(limits=(("max_file_bytes", "hard"),))

    def __init__(self, settings: LocalSettings) -> None:
        boot = boot_id()
        self.place = "local-" + digest(boot, socket.gethostname(), str(os.getuid()), chars=16)
        self.settings = settings
        self.root = Path(settings.root).absolute()
        self.lease = self.root / "lease"
        self.shims = ShimSettings(
            lease=self.lease, lease_s=settings.lease_s, boot_id=boot, max_file_bytes=settings.max_file_bytes
        )
        self.children = Children()
        self.marked = MarkedProcesses()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Settings are those of `LocalSettings`. Raises ConfigError."""
        return cls(LocalSettings.of(cls.name, settings))

    async def __aenter__(self) -> Self:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lease.touch()
        except OSError as error:
            raise SandboxError(
                f"the folder of local sandboxes cannot be used: {error}",
                hint="set [worker] sandboxes to a writable one",
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.children.close()

    def reaches(self, place: str) -> bool:
        """Only this boot of this machine or container, as this user."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> LocalSandbox:
        """Make the folder of a sandbox. Raises SandboxError."""
        name = f"{labels.rollout_id}.{labels.attempt}.{secrets.token_hex(8)}"
        if not _FOLDER.match(name):
            raise SandboxError(f"{labels.rollout_id!r} is no rollout id", hint="use Rollout.of")
        folder = self.root / name
        await asyncio.to_thread(_make, folder, labels)
        return LocalSandbox(self, folder)

    async def open(self, ref: SandboxRef) -> LocalSandbox:
        """A sandbox of this place, also one under another root. Raises SandboxError."""
        folder = Path(ref.handle)
        if ref.backend != self.name or not self.reaches(ref.place):
            raise SandboxError(
                f"the sandbox {ref.handle} is at {ref.place}, this worker at {self.place}",
                hint="a rollout whose place is gone moves to a new attempt",
            )
        if not folder.is_absolute() or not _FOLDER.match(folder.name):
            raise SandboxError(f"{ref.handle!r} is no local sandbox", hint="take the reference that `create` gave")
        return LocalSandbox(self, folder)

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every sandbox under the root, half-made and half-removed ones too."""
        owned = {}
        try:
            entries = list(self.root.iterdir())
        except OSError as error:
            raise SandboxError(f"the local sandboxes cannot be listed: {error}") from error
        for entry in entries:
            name = entry.name.removesuffix(_GONE)
            if match := _FOLDER.match(name):
                ref = LocalSandbox(self, self.root / name).ref
                owned[name] = (ref, _labels(entry, match["rollout"], int(match["attempt"])))
        return list(owned.values())

    async def renew_lease(self) -> None:
        """Touch the lease file; makes it anew when somebody removed it. Raises SandboxError."""
        try:
            self.lease.touch()
        except OSError as error:
            raise SandboxError(f"the lease of the local sandboxes cannot be renewed: {error}") from error


class LocalSandbox:
    """One folder under a local backend's root."""

    def __init__(self, backend: LocalBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._nonce = folder.name.rpartition(".")[2]
        self._ended: dict[str, asyncio.Event] = {}

    gateway_url = None

    @property
    def ref(self) -> SandboxRef:
        """The handle is the folder's path."""
        return SandboxRef(backend=self._backend.name, place=self._backend.place, handle=str(self._folder))

    @property
    def home(self) -> str:
        """The agent's HOME."""
        return str(self._folder / "home")

    @property
    def workdir(self) -> str:
        """Where the agent starts, and where a task's files are."""
        return str(self._folder / "work")

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Literal["work", "home"] = "work") -> None:
        """Write files below the working directory or the home. Raises SandboxError that names the path."""
        top = self._folder / base
        checked = {check_path(path): content for path, content in files.items()}
        await asyncio.to_thread(write_files, top, checked)

    async def exec(
        self,
        script_or_argv: str | tuple[str, ...],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        max_output_bytes: int = 65_536,
    ) -> ExecResult:
        """Run a script or program through a shim of its own, wait for it, and forget it."""
        argv = ("sh", "-c", script_or_argv) if isinstance(script_or_argv, str) else script_or_argv
        name = f"exec-{secrets.token_hex(8)}"
        try:
            await self.start(name, Command(argv, env or {}), deadline_s=timeout_s)
            end = await self.wait(name)
            stdout, stderr = await self.output(name, max_output_bytes + 1)
        except asyncio.CancelledError:
            await asyncio.shield(self.kill(name))
            raise
        shutil.rmtree(self._control(name), ignore_errors=True)
        if end.reason not in ("exited", "deadline"):
            raise SandboxError(f"a command in the sandbox {self._folder.name} did not end by itself: {end.reason}")
        return ExecResult(
            exit_code=end.exit_code,
            stdout=stdout[-max_output_bytes:],
            stderr=stderr[-max_output_bytes:],
            timed_out=end.reason == "deadline",
            truncated=max(len(stdout), len(stderr)) > max_output_bytes,
        )

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Start `command` behind a shim of its own session. Raises SandboxError."""
        shim = self._shim(name)
        if shim.started():
            return False
        env = self._environment(command.env)
        # Shielded, so that a shim which was spawned is always adopted.
        token, ended = await asyncio.shield(self._spawn(shim, command, env, deadline_s))
        pause_s = 0.001
        while not shim.claimed_by() and not ended.is_set():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        if shim.claimed_by() == token:
            self._ended[name] = ended
            return True
        if not self._folder.exists():
            raise SandboxError(f"the sandbox {self._folder} is gone", hint="a new attempt makes another")
        return False

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the shim's word; when the shim is dead without one, kill what it left and say `lost`."""
        shim = self._shim(name)
        ended = self._ended.get(name)
        pause_s = MIN_POLL_S
        while (end := shim.end()) is None and shim.alive():
            if ended is not None and not ended.is_set():
                await ended.wait()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
        end = end or shim.end()  # it may have been written just before the shim ended
        if end is None:
            shim.ask_killed()
            shim.kill_group(self._backend.shims.boot_id)
        await self._backend.marked.kill(shim.mark)
        self._ended.pop(name, None)
        return end or ProcessEnd(None, "lost")

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The end of each stream; empty for a process that was never started."""
        folder = self._control(name)
        return tail(folder / "stdout", max_bytes), tail(folder / "stderr", max_bytes)

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """Read a file by its path relative to the working directory, or an absolute one in the sandbox."""
        return await asyncio.to_thread(read_inside, self._folder, Path(self.workdir, path), max_bytes)

    async def kill(self, name: str) -> None:
        """Kill the process; its shim then writes `killed`."""
        shim = self._shim(name)
        if not shim.started():
            return
        if shim.end() is None:
            shim.ask_killed()
            await self._end_shim(shim)
        await self._backend.marked.kill(shim.mark)

    async def destroy(self) -> None:
        """Rename the folder, so that nothing can be started in it any more; kill; remove."""
        gone = self._folder.with_name(self._folder.name + _GONE)
        try:
            self._folder.rename(gone)
        except FileNotFoundError:
            if not gone.exists():
                return
        except OSError as error:
            raise SandboxError(f"the sandbox {self._folder} cannot be removed: {error}") from error
        control = gone / "control"
        for folder in list(control.iterdir()) if control.exists() else []:
            shim = Shim(folder, self._mark(folder.name))
            if shim.started():
                await self._end_shim(shim)
        await self._backend.marked.kill(f"{self._nonce}.")
        await asyncio.to_thread(remove_tree, gone)

    async def _spawn(
        self, shim: Shim, command: Command, env: Mapping[str, str], deadline_s: float
    ) -> tuple[str, asyncio.Event]:
        work = Path(self.workdir)
        pid, token = await asyncio.to_thread(shim.spawn, work, command, env, deadline_s, self._backend.shims)
        return token, self._backend.children.adopt(pid)

    async def _end_shim(self, shim: Shim) -> None:
        """Kill the agent until its shim has seen it, or is dead itself."""
        pause_s = 0.001
        while shim.end() is None and shim.alive():
            shim.kill_group(self._backend.shims.boot_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        if shim.end() is None:
            shim.kill_group(self._backend.shims.boot_id)

    def _control(self, name: str) -> Path:
        if not _PROCESS.match(name):
            raise SandboxError(f"{name!r} names no process", hint="use lower-case letters, digits, '-' and '_'")
        return self._folder / "control" / name

    def _mark(self, name: str) -> str:
        return f"{self._nonce}.{name}."

    def _shim(self, name: str) -> Shim:
        return Shim(self._control(name), self._mark(name))

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """What a process sees: nothing of the worker's own environment."""
        for name in more:
            if not _VARIABLE.match(name) or name in _SHELL_VARIABLES or name.startswith("shim_"):
                raise SandboxError(
                    f"the environment variable {name!r} cannot be set in a local sandbox",
                    hint="names are letters, digits and '_', and none that the shell sets itself",
                )
        base = {
            "PATH": self._backend.settings.path,
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "TMPDIR": str(self._folder / "tmp"),
        }
        return base | dict(more)


def boot_id() -> str:
    """What tells this boot of the machine from others: Linux's boot id, elsewhere the boot time (macOS: not tried)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        sysctl = subprocess.run(["sysctl", "-n", "kern.boottime"], capture_output=True, check=False)
        return digest(sysctl.stdout, sys.platform, chars=32)


def _make(folder: Path, labels: Labels) -> None:
    try:
        folder.mkdir(mode=0o700)
        (folder / "labels.json").write_bytes(msgspec.json.encode(labels))
        for part in ("home", "work", "tmp", "control"):
            (folder / part).mkdir()
    except OSError as error:
        raise SandboxError(
            f"the sandbox {folder} cannot be made: {error}", hint="is there room on the disk? see `df` and `df -i`"
        ) from error


def _labels(folder: Path, rollout_id: str, attempt: int) -> Labels:
    """The labels of a sandbox; made from its name when it died before they were written."""
    try:
        return msgspec.json.decode((folder / "labels.json").read_bytes(), type=Labels)
    except (OSError, msgspec.MsgspecError):
        try:
            created_s = folder.stat().st_mtime
        except OSError:
            created_s = time.time()
        return Labels(run="", rollout_id=rollout_id, attempt=attempt, owner="", created_ms=int(created_s * 1000))
