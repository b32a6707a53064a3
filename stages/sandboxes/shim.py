"""The worker's side of shim.sh: starting a shim, and reading what it keeps in its control folder."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import EndReason, ProcessEnd

SCRIPT: Final = Path(__file__).with_name("shim.sh")
LOCK_FD: Final = 9
DATA_FD: Final = 8
POLL_S: Final = 0.05
_FILE_BLOCK_BYTES: Final = 512
_SIGNALS: Final = frozenset(signal.valid_signals())
# Python ignores SIGPIPE and SIGXFSZ; an ignored signal stays ignored through exec.
DEFAULT_SIGNALS: Final = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGCHLD,
)


class Children:
    """The shims that this process started. They are reaped as they end, without a thread for each."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._poll: asyncio.Task[None] | None = None

    def adopt(self, pid: int) -> asyncio.Event:
        """An event that is set when `pid` has ended."""
        self._ended[pid] = asyncio.Event()
        try:
            self._files[pid] = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not Linux, or no descriptor left
            if self._poll is None or self._poll.done():
                self._poll = asyncio.create_task(self._reap_unwatched())
        else:
            asyncio.get_running_loop().add_reader(self._files[pid], self._on_end, pid)
        return self._ended[pid]

    def close(self) -> None:
        """Forget all; they live on."""
        for file in self._files.values():
            asyncio.get_running_loop().remove_reader(file)
            os.close(file)
        self._files.clear()
        for ended in self._ended.values():
            ended.set()
        self._ended.clear()
        if self._poll is not None:
            self._poll.cancel()

    def _on_end(self, pid: int) -> None:
        file = self._files.pop(pid)
        asyncio.get_running_loop().remove_reader(file)
        os.close(file)
        _reaped(pid)
        self._ended.pop(pid).set()

    async def _reap_unwatched(self) -> None:
        while unwatched := self._ended.keys() - self._files.keys():
            for pid in unwatched:
                if _reaped(pid):
                    self._ended.pop(pid).set()
            await asyncio.sleep(POLL_S)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a shim executes, where, and with what. `data` is a file at its start, at descriptor `DATA_FD`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdin: bytes = b""
    data: bytes | None = None
    file_blocks: int | None = None  # of `ulimit -f`; None: by the settings of all shims


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimSettings:
    """What all shims of a backend are given."""

    lease: Path
    lease_s: float
    boot_id: str
    max_file_bytes: int
    shell: str = "/bin/sh"
    setsid: str = shutil.which("setsid") or ""  # empty: Python does its work


@dataclass(frozen=True, slots=True)
class Prepared:
    """A shim that can be started: its name among those that try, its input, and files to hand over: lock, data."""

    token: str
    stdin: Path
    files: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shim:
    """One process of a sandbox, as its control folder shows it."""

    folder: Path
    mark: str

    def prepare(self, launch: Launch) -> Prepared:
        """Make the files that a shim needs which will try to claim this process. Raises SandboxError."""
        token = secrets.token_hex(8)
        stdin = Path(os.devnull)
        files: list[int] = []
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if launch.stdin:
                stdin = self.folder / f"stdin.{token}"
                stdin.write_bytes(launch.stdin)
            files.append(_locked(self.folder / f"lock.{token}", os.O_CREAT))
            if (data := data_file(launch)) is not None:
                files.append(data)
        except OSError as error:
            for file in files:
                os.close(file)
            raise self._cannot_start(launch, error) from error
        return Prepared(token, stdin, tuple(files))

    def spawn(self, launch: Launch, prepared: Prepared, deadline_s: float, settings: ShimSettings) -> int:
        """Start that shim; returns its pid. Raises SandboxError.

        To be called on the thread of the event loop: what asyncio starts has inheritable files for a moment, and an
        agent that got one could write into it, and would keep it open.
        """
        actions = [
            *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)),
            *((os.POSIX_SPAWN_DUP2, file, at) for file, at in zip(prepared.files, (LOCK_FD, DATA_FD), strict=False)),
        ]
        try:
            return os.posix_spawn(
                settings.shell,
                self._argv(launch, prepared, deadline_s, settings) + list(launch.argv),
                launch.env,
                file_actions=actions,
                setsid=True,
                setsigdef=DEFAULT_SIGNALS,
                setsigmask=(),
            )
        except (OSError, ValueError) as error:
            raise self._cannot_start(launch, error) from error
        finally:
            for file in prepared.files:
                os.close(file)

    def _cannot_start(self, launch: Launch, error: Exception) -> SandboxError:
        return SandboxError(
            f"the process {self.folder.name!r} cannot be started in {launch.cwd}: {error}",
            hint="is the sandbox still there? Command and environment hold no NUL and are at most 128 KiB each",
        )

    def _argv(self, launch: Launch, prepared: Prepared, deadline_s: float, settings: ShimSettings) -> list[str]:
        blocks = file_blocks(settings.max_file_bytes) if launch.file_blocks is None else launch.file_blocks
        return [
            "sh",
            *map(str, (SCRIPT, self.folder, launch.cwd, prepared.stdin, settings.lease)),
            *(str(max(1, round(seconds * 1000))) for seconds in (settings.lease_s, deadline_s)),
            self.mark,
            prepared.token,
            settings.boot_id,
            str(blocks),
            settings.setsid,
            sys.executable,
        ]

    def claimed_by(self) -> str:
        """The token of the shim that made the claim; empty: none did."""
        return _line(self.folder / "started")

    def started(self) -> bool:
        """Whether somebody made the claim, even one that died at it."""
        return (self.folder / "started").exists()

    def end(self) -> ProcessEnd | None:
        """How the process ended, if its shim saw it."""
        status, _, reason = _line(self.folder / "exit").partition(" ")
        return ProcessEnd(_exit_code(int(status)), cast(EndReason, reason)) if reason else None

    def alive(self) -> bool:
        """Whether a shim of this process lives: it holds a lock that dies with it."""
        for path in self.folder.glob("lock.*"):
            try:
                os.close(_locked(path))
            except BlockingIOError:
                return True
            except FileNotFoundError:
                return False
        return False

    def ask_killed(self) -> None:
        """Let the shim write `killed` as the reason of the end, and what a dead shim left behind stop watching."""
        with suppress(FileNotFoundError):
            (self.folder / "killed").touch()

    def living_pid(self, boot_id: str) -> int | None:
        """The process that the shim started, while it lives."""
        return living_pid(self.folder / "pid", boot_id)

    def kill_group(self, boot_id: str) -> None:
        """Kill the agent and its process group, if they are what the shim started."""
        pid, _, rest = _line(self.folder / "pid").partition(" ")
        began, _, boot = rest.partition(" ")
        if not boot or boot != boot_id:
            return
        # A group lives on after its leader; only a leader of another start time says that the number was given anew.
        if start_time(pid) in ("", began):
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(int(pid), signal.SIGKILL)


def file_blocks(max_file_bytes: int) -> int:
    """What `ulimit -f` is given for a limit in bytes: it counts in blocks, and nobody may go over his own limit."""
    _, most_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)
    return (max_file_bytes if most_bytes < 0 else min(max_file_bytes, most_bytes)) // _FILE_BLOCK_BYTES


def data_file(launch: Launch) -> int | None:
    """A descriptor, closed on exec, of what a launch is given at `DATA_FD`; None: nothing. Raises OSError."""
    if launch.data is None:
        return None
    file = os.memfd_create("launch")
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(launch.data)
        os.lseek(file, 0, os.SEEK_SET)
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, LOCK_FD + 1)
    finally:
        os.close(file)


def _locked(path: Path, flags: int = 0, kind: int = fcntl.LOCK_EX) -> int:
    """A descriptor of `path` that holds its lock. Raises BlockingIOError when another holds it."""
    file = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        # Above LOCK_FD, so that no descriptor is duplicated onto itself, which would leave it closed on exec.
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, LOCK_FD + 1)
    finally:
        os.close(file)


def _line(path: Path) -> str:
    """The one line of a file; empty when there is no file, or a shim died while writing it."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return data[:-1].decode(errors="replace") if data.endswith(b"\n") else ""


def _exit_code(status: int) -> int:
    """A shell's status as Python counts it: 128 + n becomes -n."""
    return 128 - status if status - 128 in _SIGNALS else status


def living_pid(record: Path, boot_id: str) -> int | None:
    """The process of a record "PID START_TIME BOOT", while it lives."""
    pid, _, rest = _line(record).partition(" ")
    began, _, boot = rest.partition(" ")
    return int(pid) if boot and boot == boot_id and start_time(pid) == began else None


def lock_shared(path: Path) -> int:
    """A descriptor, closed on exec, that holds a shared lock of `path`. Raises OSError."""
    return _locked(path, kind=fcntl.LOCK_SH)


def start_time(pid: str) -> str:
    """Clock tick at which a process was started; empty when there is none, it is a zombie, or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
