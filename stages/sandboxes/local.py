"""Sandbox backend `local`: a folder and a process group of its own on this machine.

It isolates nothing: an agent can do whatever the worker's user can do. It keeps honest agents apart, gives them a
scrubbed environment, and ends them with everything that they started.

    <root>/<rollout>.<attempt>.<nonce>/     one sandbox, as folder.py says
        home/  work/  tmp/

Caps on output: RLIMIT_FSIZE bounds every file that an agent writes, its standard output and error among them, at
`max_file_bytes`; whoever reads output gets the end of it, as long as they ask for.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import Limits, NetworkMode
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.images.packer import pack
from rollyard.stages.pipes.pty import PtyPipe
from rollyard.stages.pipes.subprocess import SubprocessPipe
from rollyard.stages.sandbox import (
    DEFAULT_PLAN,
    MAX_OUTPUT_BYTES,
    MAX_TREE_BYTES,
    Base,
    Change,
    ExecResult,
    Labels,
    Plan,
    ProcessEnd,
    Stats,
    check_path,
)
from rollyard.stages.sandboxes.census import VARIABLE
from rollyard.stages.sandboxes.files import read_inside, remove_tree, unpack_inside, write_files
from rollyard.stages.sandboxes.folder import SandboxRoot, boot_id, nonce_of, put_aside, this_machine
from rollyard.stages.sandboxes.settings import BackendSettings
from rollyard.stages.sandboxes.shim import Launch, ShimSettings, file_blocks
from rollyard.stages.sandboxes.shimmed import Host, ShimmedProcesses, check_shell_variables
from rollyard.stages.sandboxes.usage import used_by_marked
from rollyard.stages.shell import Pipe, PipeShell, Shell

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITED: Final = 'ulimit -f "$0"; exec "$@"'


class LocalSettings(BackendSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the backend `local`."""

    max_file_bytes: Annotated[int, Meta(ge=512, description="bytes that one file of an agent may have")] = 256 << 20
    path: Annotated[str, Meta(description="PATH inside sandboxes")] = PATH


class LocalBackend:
    """Makes sandboxes under `settings.root`. Raises SandboxError when that folder cannot be written."""

    name = "local"
    capabilities = Capabilities(limits=(("max_file_bytes", "hard"),), tty=True)

    def __init__(self, settings: LocalSettings) -> None:
        self.place = this_machine(self.name)
        self.settings = settings
        self.root = Path(settings.root).absolute()
        self.shims = ShimSettings(
            lease=self.root / "lease",
            lease_s=settings.lease_s,
            boot_id=boot_id(),
            max_file_bytes=settings.max_file_bytes,
        )
        self.host = Host(self.shims)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Settings are those of `LocalSettings`. Raises ConfigError."""
        return cls(LocalSettings.of(cls.name, settings))

    @property
    def folders(self) -> SandboxRoot:
        """The folder of its sandboxes."""
        return SandboxRoot(self.name, self.place, self.root)

    async def __aenter__(self) -> Self:
        self.folders.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.host.children.close()

    def reaches(self, place: str) -> bool:
        """Only this boot of this machine or container, as this user."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> LocalSandbox:
        """Make the folder of a sandbox. Raises SandboxError."""
        folder = await asyncio.to_thread(self._make, labels, plan)
        return LocalSandbox(self, folder)

    def _make(self, labels: Labels, plan: Plan) -> Path:
        folder = self.folders.make(labels, ("home", "work", "tmp"))
        if plan.limits != Limits():
            (folder / "limits.json").write_bytes(msgspec.json.encode(plan.limits))
        return folder

    async def open(self, ref: SandboxRef) -> LocalSandbox:
        """A sandbox of this place, also one under another root. Raises SandboxError."""
        return LocalSandbox(self, self.folders.folder_of(ref))

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every sandbox under the root, half-made and half-removed ones too."""
        return self.folders.owned()

    async def renew_lease(self) -> None:
        """Touch the lease file; makes it anew when somebody removed it. Raises SandboxError."""
        self.folders.renew()


class LocalSandbox:
    """One folder under a local backend's root."""

    gateway_url = None

    def __init__(self, backend: LocalBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        max_file_bytes = _limits(folder).max_file_bytes or backend.settings.max_file_bytes
        self._blocks = file_blocks(min(max_file_bytes, backend.shims.max_file_bytes))
        self._processes = ShimmedProcesses(backend.host, folder, self._wrap)

    @property
    def ref(self) -> SandboxRef:
        """The handle is the folder's path."""
        return self._backend.folders.ref(self._folder)

    @property
    def home(self) -> str:
        """The agent's HOME."""
        return str(self._folder / "home")

    @property
    def workdir(self) -> str:
        """Where the agent starts, and where a task's files are."""
        return str(self._folder / "work")

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Base = "work") -> None:
        """Write files below the working directory or the home. Raises SandboxError that names the path."""
        checked = {check_path(path): content for path, content in files.items()}
        await asyncio.to_thread(write_files, self._folder / base, checked)

    async def put_tree(self, archive: bytes | Path, target: str) -> None:
        """Unpack an archive below a folder of the sandbox, which is made if need be. Raises SandboxError."""
        folder = Path(self.workdir, target)
        await asyncio.to_thread(unpack_inside, self._folder, folder, archive, MAX_TREE_BYTES)

    async def get_tree(self, path: str, *, max_bytes: int = MAX_TREE_BYTES, exclude: Sequence[str] = ()) -> bytes:
        """Pack a file or folder of the sandbox. Raises SandboxError when there is none, or it is too large."""
        whole = Path(self.workdir, path)
        if not whole.parent.resolve().is_relative_to(self._folder.resolve()):
            raise SandboxError(f"the path {path!r} leaves the sandbox")
        own_content = path in ("", ".") or path.endswith(("/.", "/"))
        name = "." if own_content else os.path.basename(path)  # noqa: PTH119 - as it is written
        return await asyncio.to_thread(pack, whole, name, max_bytes=max_bytes, exclude=tuple(exclude))

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """Read a file by its path relative to the working directory, or an absolute one in the sandbox."""
        return await asyncio.to_thread(read_inside, self._folder, Path(self.workdir, path), max_bytes)

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
        """Run a script or program through a shim of its own, wait for it, and forget it."""
        _check_user(user)
        argv = ("sh", "-c", script_or_argv) if isinstance(script_or_argv, str) else tuple(script_or_argv)
        command = Command(argv, env or {}, stdin=stdin)
        return await self._processes.exec(command, cwd=cwd, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def shell(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
    ) -> Shell:
        """A shell of its own session, a child of this process."""
        _check_user(user)

        async def opened(argv: tuple[str, ...]) -> Pipe:
            mark = self._processes.mark(f"shell-{secrets.token_hex(8)}")
            launch = self._wrap(Command(argv, env or {}), cwd, mark)
            spawn = PtyPipe.spawn if tty else SubprocessPipe.spawn

            async def kill() -> None:
                await self._backend.host.marked.kill(mark)

            whole_env = {**launch.env, VARIABLE: mark}
            limited = ("/bin/sh", "-c", _LIMITED, str(self._blocks), *argv)
            return await spawn(limited, inner=argv, cwd=launch.cwd, env=whole_env, kill=kill)

        return await PipeShell.opened(opened)

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Start `command` behind a shim of its own session. Raises SandboxError."""
        return await self._processes.start(name, command, deadline_s=deadline_s)

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the shim's word; when the shim is dead without one, kill what it left and say `lost`."""
        return await self._processes.wait(name)

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The end of each stream; empty for a process that was never started."""
        return await self._processes.output(name, max_bytes)

    async def kill(self, name: str) -> None:
        """Kill the process; its shim then writes `killed`."""
        await self._processes.kill(name)

    async def snapshot(self) -> str:
        """Not of this backend."""
        raise SandboxError("the backend 'local' makes no snapshots", hint="use the backend bubblewrap or docker")

    async def diff(self) -> list[Change]:
        """Not of this backend."""
        raise SandboxError("the backend 'local' has no image to compare with", hint="use the backend bubblewrap")

    async def set_network(self, mode: NetworkMode, allow_hosts: Sequence[str] = ()) -> None:
        """Not of this backend."""
        raise SandboxError("the backend 'local' cannot change the network", hint="use another backend")

    async def stats(self) -> Stats:
        """What its processes use, found by their marks. What is written is not counted."""
        return await asyncio.to_thread(used_by_marked, f"{nonce_of(self._folder)}.")

    async def close_channels(self) -> None:
        """There are none: what runs is reached through its control folder."""

    async def destroy(self) -> None:
        """Rename the folder, so that nothing can be started in it any more; kill; remove."""
        if (gone := put_aside(self._folder)) is None:
            return
        await self._processes.end_all(gone)
        await asyncio.to_thread(remove_tree, gone)

    def _wrap(self, command: Command, cwd: str | None, mark: str) -> Launch:
        """What a process sees: nothing of the worker's own environment."""
        check_shell_variables(command.env)
        base = {
            "PATH": self._backend.settings.path,
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "TMPDIR": str(self._folder / "tmp"),
        }
        folder = str(Path(self.workdir, cwd or ""))
        return Launch(
            argv=tuple(command.argv),
            env=base | dict(command.env),
            cwd=folder,
            stdin=command.stdin,
            file_blocks=self._blocks,
        )


def _limits(folder: Path) -> Limits:
    try:
        return msgspec.json.decode((folder / "limits.json").read_bytes(), type=Limits)
    except (OSError, msgspec.MsgspecError):
        return Limits()


def _check_user(user: str | None) -> None:
    """Raises SandboxError for a user that is not the worker's own."""
    if not user:
        return
    own = os.getuid()
    try:
        known = {str(own), pwd.getpwuid(own).pw_name}
    except KeyError:
        known = {str(own)}
    if user not in known:
        raise SandboxError(f"the backend 'local' cannot run as user {user!r}", hint="leave user empty")
