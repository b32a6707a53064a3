"""One bubblewrap sandbox: its holder, its processes, and what can be asked of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.pipes.pty import PtyPipe
from rollyard.stages.pipes.subprocess import SubprocessPipe
from rollyard.stages.sandbox import (
    MAX_OUTPUT_BYTES,
    MAX_TREE_BYTES,
    Base,
    Change,
    ExecResult,
    ProcessEnd,
    Stats,
)
from rollyard.stages.sandboxes import jail_layer
from rollyard.stages.sandboxes.census import VARIABLE
from rollyard.stages.sandboxes.door import GATEWAY_URL
from rollyard.stages.sandboxes.families import namespace_of
from rollyard.stages.sandboxes.files import remove_tree
from rollyard.stages.sandboxes.folder import nonce_of, put_aside
from rollyard.stages.sandboxes.jail import Jail, command_line, options
from rollyard.stages.sandboxes.jail_files import JailFiles
from rollyard.stages.sandboxes.jail_holder import PATH, Holder
from rollyard.stages.sandboxes.jail_kin import kill_members, kill_strays, members
from rollyard.stages.sandboxes.memory import Watched
from rollyard.stages.sandboxes.shim import DATA_FD, Launch, file_blocks
from rollyard.stages.sandboxes.shimmed import ShimmedProcesses
from rollyard.stages.sandboxes.usage import total
from rollyard.stages.shell import Pipe, PipeShell, Shell

if TYPE_CHECKING:
    from rollyard.stages.sandboxes.bubblewrap import BubblewrapBackend

_USERS: Final = frozenset({None, "", "root", "0"})
# The file is gone as soon as it is open. Limits are set here, since no shim does.
_WITH_DATA: Final = f'exec {DATA_FD}<"$0"; rm -f "$0"; ulimit -f "$1"; shift; exec "$@"'


class BubblewrapSandbox:
    """One folder under a bubblewrap backend's root, and the namespaces that its holder keeps."""

    def __init__(self, backend: BubblewrapBackend, folder: Path, jail: Jail | None) -> None:
        self._backend = backend
        self._folder = folder
        self._nonce = nonce_of(folder)
        self._known = jail
        self.holder = Holder(folder, backend.shims.boot_id)
        self._processes = ShimmedProcesses(backend.host, folder, self._wrap)
        self._files = JailFiles(self._launch, backend.host.marked, self._processes.mark)
        if jail is not None and jail.memory_bytes is not None:
            watched = Watched(jail.memory_bytes, self._namespace, self._end_for_memory, self._end_lost)
            backend.memory.add(folder.name, watched)

    @property
    def ref(self) -> SandboxRef:
        """The handle is the folder's path."""
        return self._backend.folders.ref(self._folder)

    @property
    def home(self) -> str:
        """The agent's HOME, as seen inside."""
        return self._jail.home

    @property
    def workdir(self) -> str:
        """Where the agent starts, as seen inside."""
        return self._jail.workdir

    @property
    def gateway_url(self) -> str | None:
        """The gateway as seen inside; None where the network is the machine's own."""
        return GATEWAY_URL if self._jail.network == "gateway" else None

    # --- files

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Base = "work") -> None:
        """Write files, all by one tar inside. Raises SandboxError that names the path."""
        await self._files.put(files, self.workdir if base == "work" else self.home)

    async def put_tree(self, archive: bytes | Path, target: str) -> None:
        """Unpack an archive inside. Raises SandboxError that names the member."""
        await self._files.put_tree(archive, self.workdir, target)

    async def get_tree(self, path: str, *, max_bytes: int = MAX_TREE_BYTES, exclude: Sequence[str] = ()) -> bytes:
        """Pack a file or folder inside. Raises SandboxError when there is none, or it is too large."""
        return await self._files.get_tree(self.workdir, path, max_bytes, exclude)

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """The start of a regular file; None: there is none."""
        return await self._files.read(self.workdir, path, max_bytes)

    # --- commands

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
        """Run a script or program in a jail of its own, behind a shim."""
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
        """A shell in a jail of its own, which dies with this process."""
        _check_user(user)

        async def opened(argv: tuple[str, ...]) -> Pipe:
            mark = self._processes.mark(f"shell-{secrets.token_hex(8)}")
            launch = self._launch(Command(argv, env or {}), cwd, mark, tty=tty)
            data = self._folder / f"{mark}options"
            data.write_bytes(launch.data or b"")
            blocks = str(file_blocks(self._jail.max_file_bytes))

            async def kill() -> None:
                data.unlink(missing_ok=True)
                await self._backend.host.marked.kill(mark)

            spawn = PtyPipe.spawn if tty else SubprocessPipe.spawn
            return await spawn(
                ("/bin/sh", "-c", _WITH_DATA, str(data), blocks, *launch.argv),
                inner=argv,
                cwd=launch.cwd,
                env={**launch.env, VARIABLE: mark},
                kill=kill,
            )

        return await PipeShell.opened(opened)

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Start `command` in a jail of its own, behind a shim of its own session. Raises SandboxError."""
        left_s = self._jail.until_s - time.time()
        return await self._processes.start(name, command, deadline_s=max(min(deadline_s, left_s), 0.001))

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the shim's word; when the shim is dead without one, kill what it left and say `lost`."""
        end = await self._processes.wait(name)
        await asyncio.to_thread(self._end_strays)
        return end

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The end of each stream; empty for a process that was never started."""
        return await self._processes.output(name, max_bytes)

    async def kill(self, name: str) -> None:
        """Kill the process; its shim then writes `killed`."""
        await self._processes.kill(name)

    # --- the sandbox itself

    async def snapshot(self) -> str:
        """Keep what was written as an image over the present one. Raises SandboxError without an image."""
        jail = self._jail
        if not jail.image:
            raise SandboxError("a sandbox without image cannot be kept", hint="set sandbox.image")
        upper = self._upper()
        return await asyncio.to_thread(jail_layer.keep, upper, jail, self._backend.images, self._nonce)

    async def diff(self) -> list[Change]:
        """What was written, without what Rollyard itself made."""
        jail = self._jail
        lowers = await asyncio.to_thread(self._lowers)
        return await asyncio.to_thread(jail_layer.changes, self._upper(), lowers, jail)

    async def set_network(self, mode: NetworkMode, allow_hosts: Sequence[str] = ()) -> None:
        """Not of this backend."""
        raise SandboxError("the backend 'bubblewrap' cannot change the network", hint="use another backend")

    async def stats(self) -> Stats:
        """What its living processes use, and what it has written."""
        holder = self._holder()
        return await asyncio.to_thread(_stats, holder, Path(f"/proc/{holder}/root{self._jail.base}"))

    async def close_channels(self) -> None:
        """There are none: what runs is reached through its control folder."""

    async def destroy(self) -> None:
        """Rename the folder, so that nothing can be started in it any more; kill; remove. Mounts end with processes."""
        self._backend.memory.forget(self._folder.name)
        namespace, network = self._namespace(), self._known and self._known.network
        if (gone := put_aside(self._folder)) is None:
            return
        await Holder(gone, self._backend.shims.boot_id).kill()
        if network != "none":
            await self._backend.close_door(self._folder)
        await self._processes.end_all(gone, namespace)
        await asyncio.to_thread(remove_tree, gone)

    @property
    def _jail(self) -> Jail:
        if self._known is None:
            self._known = read_jail(self._folder)
        if self._known is None:
            raise SandboxError(f"the sandbox {self._folder} is gone", hint="a new attempt makes another")
        return self._known

    def _holder(self) -> int:
        """The process id of the holder. Raises SandboxError when it has ended, and with it the sandbox."""
        if (pid := self.holder.pid()) is not None:
            return pid
        if not self._folder.exists():
            raise SandboxError(f"the sandbox {self._folder} is gone", hint="a new attempt makes another")
        late = self._jail.until_s <= time.time()
        why = "its deadline has passed" if late else "no worker renewed its lease, or somebody killed it"
        raise SandboxError(f"the sandbox {self._folder} has ended: {why}", hint="a new attempt makes another")

    def _namespace(self) -> int | None:
        """The user namespace of the holder, which all processes of the sandbox are in or below."""
        pid = self.holder.pid()
        return None if pid is None else namespace_of(pid)

    def _wrap(self, command: Command, cwd: str | None, mark: str) -> Launch:
        return self._launch(command, cwd, mark)

    def _launch(
        self, command: Command, cwd: str | None, mark: str, *, tty: bool = False, data_fd: int = DATA_FD
    ) -> Launch:
        """How to run a command in the jail; `mark` is carried by bwrap itself, which the agent cannot reach."""
        jail, tools = self._jail, self._backend.tools
        if not command.argv:
            raise SandboxError("the command is empty", hint="give a program and its arguments")
        line = command_line(jail, tools, self._holder(), command.argv, cwd=cwd or "", data_fd=data_fd)
        return Launch(
            argv=tuple(line),
            env={"PATH": PATH},
            cwd=str(self._folder),
            stdin=command.stdin,
            data=options(jail, tools, command.env, tty=tty),
            file_blocks=file_blocks(jail.max_file_bytes),
        )

    def _upper(self) -> Path:
        """What was written, seen through the holder's mount namespace."""
        jail = self._jail
        return Path(f"/proc/{self._holder()}/root{jail.base}", "u" if jail.image else "m")

    def _lowers(self) -> tuple[Path, ...]:
        holder = self._holder()
        return tuple(Path(f"/proc/{holder}/root{layer}") for layer in self._jail.layers)

    def _end_strays(self) -> None:
        holder = self.holder.pid()
        namespace = None if holder is None else namespace_of(holder)
        if holder is not None and namespace is not None:
            kill_strays(namespace)

    async def _end_for_memory(self) -> None:
        for shim in self._processes.running():
            with suppress(OSError):
                (shim.folder / "memory").touch()
        if (holder := self.holder.pid()) is not None and (namespace := namespace_of(holder)) is not None:
            await asyncio.to_thread(kill_members, namespace, holder)

    async def _end_lost(self) -> None:
        """A holder that ended has left shells of this worker behind; all else ends by itself."""
        with suppress(SandboxError):
            await self._backend.host.marked.kill(f"{self._nonce}.")


def read_jail(folder: Path) -> Jail | None:
    """What all processes of a sandbox have in common; None: it is half-made, or gone."""
    try:
        return msgspec.json.decode((folder / "jail.json").read_bytes(), type=Jail)
    except (OSError, msgspec.MsgspecError):
        return None


def _stats(holder: int, base: Path) -> Stats:
    disk_bytes = None
    with suppress(OSError):
        room = os.statvfs(base)
        disk_bytes = (room.f_blocks - room.f_bfree) * room.f_frsize
    return total(members(namespace_of(holder), holder), disk_bytes)


def _check_user(user: str | None) -> None:
    if user not in _USERS:
        raise SandboxError(
            f"a bubblewrap sandbox cannot run as user {user!r}",
            hint="leave user empty: it is root inside, without power",
        )
