"""Sandboxes that stand elsewhere and are entered by running `sh` in them: what docker, e2b and apptainer share.

A backend says how a program is run in one of its sandboxes (`Entrance`) and where things are (`Inside`);
`InsideSandbox` does the rest of `Sandbox` with inside.sh, a POSIX sh program that is handed over as text, so that
nothing has to be installed. What an image must have is listed at the top of inside.sh.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, cast

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.subjects import digest
from rollyard.stages.sandbox import (
    MAX_OUTPUT_BYTES,
    MAX_TREE_BYTES,
    Base,
    EndReason,
    ExecResult,
    ProcessEnd,
    check_path,
)
from rollyard.stages.sandboxes.inside_archive import checked_archive, without
from rollyard.stages.sandboxes.inside_channel import (
    HELLO_S,
    Channel,
    ChannelClosed,
    Channels,
    NoRoom,
    Reply,
    Stream,
    StreamName,
    call_text,
    check_arguments,
)
from rollyard.stages.sandboxes.inside_command import FILE_BLOCK_BYTES, exit_code, inside_argv, variables
from rollyard.stages.sandboxes.inside_shell import StreamPipe
from rollyard.stages.shell import Pipe, PipeShell, Shell

__all__ = ["Entrance", "Inside", "InsideSandbox", "Stream", "StreamName"]

MIN_POLL_S: Final = 0.02
MAX_POLL_S: Final = 0.5
REQUEST_S: Final = 120.0
TRANSFER_S: Final = 1800.0
GRACE_S: Final = 60.0
"""How much longer than its own time limit a request is waited for: inside, things are killed within 20 s."""
_LATE: Final = "9"
_NOT_THERE: Final = "3"


class Entrance(Protocol):
    """How programs are run in one sandbox."""

    binary: bool
    """Whether streams give the very bytes that were written. If not, inside.sh wraps what it sends in base64."""

    async def open(self, argv: Sequence[str], *, user: str, tty: bool = False) -> Stream:
        """Run a program as `user` (empty: the sandbox's own default), in the environment of the sandbox, as the leader
        of a session of its own.

        It lives on when the calling process dies. With `tty` its input and output are a terminal, all of it stdout.
        Raises SandboxError when the sandbox is gone, or cannot run it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """Where things are in one sandbox; all paths absolute, as seen inside. inside.sh makes the folders that lack."""

    handle: str  # the sandbox's own name; makes the marks of its processes
    workdir: str
    home: str
    control: str  # where inside.sh keeps its files; every user of the sandbox can write there
    user: str = ""  # who runs what names no user; empty: the entrance's default
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment that the entrance gives
    max_file_bytes: int = 256 << 20


class InsideSandbox:
    """All of `Sandbox` but what is the backend's own: ref, gateway_url, snapshot, diff, set_network, stats, destroy."""

    gateway_url: str | None = None

    def __init__(self, entrance: Entrance, inside: Inside) -> None:
        self._entrance = entrance
        self._inside = inside
        self._channels = Channels(self._open_channel)
        self._started: dict[str, Stream] = {}

    @property
    def home(self) -> str:
        """The agent's home as seen inside, absolute."""
        return self._inside.home

    @property
    def workdir(self) -> str:
        """The working directory as seen inside, absolute."""
        return self._inside.workdir

    async def close_channels(self) -> None:
        """Let go of all connections. The sandbox lives on; the next call opens new ones."""
        streams, self._started = self._started, {}
        for stream in streams.values():
            await stream.close()
        await self._channels.close()

    # --- files

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Base = "work") -> None:
        """Write files, one request each. Raises SandboxError that names the path."""
        top = self.workdir if base == "work" else self.home
        checked = {check_path(path): content for path, content in files.items()}
        for path, content in checked.items():
            data = content.encode() if isinstance(content, str) else bytes(content)
            reply = await self._transfer(call_text("ry_put", (top, path, len(data))), data)
            if reply.status != "0":
                raise SandboxError(f"the file {path!r} cannot be written into the sandbox: {reply.problem()}")

    async def put_tree(self, archive: bytes | Path, target: str) -> None:
        """Unpack an archive inside with tar, as the sandbox's user. Raises SandboxError that names the member."""
        data = await asyncio.to_thread(checked_archive, archive)
        folder = posixpath.join(self.workdir, target)
        reply = await self._transfer(call_text("ry_unpack", (folder, len(data))), data)
        if reply.status != "0":
            raise SandboxError(f"the archive cannot be unpacked in {folder!r}: {reply.problem()}")

    async def get_tree(self, path: str, *, max_bytes: int = MAX_TREE_BYTES, exclude: Sequence[str] = ()) -> bytes:
        """A file or folder, packed inside with tar. Raises SandboxError when there is none, or it is too large."""
        whole = posixpath.join(self.workdir, path)
        own_content = path in ("", ".") or path.endswith(("/.", "/"))
        folder, name = (whole, ".") if own_content else posixpath.split(whole)
        code = call_text("ry_pack", (max_bytes + 1, folder, name, *exclude))
        async with self._channels.one(self._inside.user) as channel:
            reply = await channel.request(code, timeout_s=TRANSFER_S, max_bytes=max_bytes + 1)
            data = channel.decoded(reply.stdout)
        if reply.status == _NOT_THERE:
            raise SandboxError(f"there is no {path!r} in the sandbox")
        if len(data) > max_bytes:
            raise SandboxError(f"{path!r} has over {max_bytes} bytes", hint="leave parts out, or allow more")
        # 1: a file changed meanwhile, which tar says of folders that somebody works in.
        if reply.status not in ("0", "1") or not data:
            raise SandboxError(f"{path!r} cannot be read from the sandbox: {reply.problem()}")
        return await asyncio.to_thread(without, data, exclude) if exclude else data

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """The start of a regular file; None: there is none."""
        code = call_text("ry_get", (posixpath.join(self.workdir, path), max_bytes))
        async with self._channels.one(self._inside.user, alive=True) as channel:
            reply = await channel.request(code, timeout_s=REQUEST_S, max_bytes=max_bytes)
            data = channel.decoded(reply.stdout)
        if reply.status == _NOT_THERE:
            return None
        if reply.status != "0" or reply.stderr.strip():
            raise SandboxError(f"the file {path!r} cannot be read: {reply.problem()}")
        return data

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
        """Run a script or program in a channel. Its mark finds what it left, also when the caller is cancelled."""
        argv = ("sh", "-c", script_or_argv) if isinstance(script_or_argv, str) else script_or_argv
        mark = _new_mark()
        kept_bytes = max_output_bytes + 1
        code = call_text(
            "ry_exec",
            (kept_bytes, len(stdin), mark, max(1, round(timeout_s * 1000)), *self._running(cwd, env), *argv),
        )
        whose = user or self._inside.user
        try:
            async with self._channels.one(whose, alive=True) as channel:
                reply = await channel.request(code, stdin, timeout_s=timeout_s + GRACE_S, max_bytes=kept_bytes)
                stdout, stderr = channel.decoded(reply.stdout), channel.decoded(reply.stderr)
        except (asyncio.CancelledError, ChannelClosed, SandboxError):
            with suppress(SandboxError):
                await asyncio.shield(self._request(f"ry_kill {mark}", user=whose))
            raise
        status, _, late = reply.status.partition(" ")
        if not status.isdecimal() or not late:
            raise SandboxError(f"a command in the sandbox did not end by itself: {reply.problem()}")
        timed_out = late == _LATE
        return ExecResult(
            exit_code=exit_code(int(status)),
            stdout=stdout[-max_output_bytes:] if max_output_bytes else b"",
            stderr=stderr[-max_output_bytes:] if max_output_bytes else b"",
            timed_out=timed_out,
            truncated=max(len(stdout), len(stderr)) > max_output_bytes,
        )

    async def shell(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
    ) -> Shell:
        """A shell over a stream of its own."""
        whose = user or self._inside.user
        await self._request(":")  # makes the folders

        async def opened(argv: tuple[str, ...]) -> Pipe:
            mark = _new_mark()
            given = ("shell", mark, *self._running(cwd, env), *argv)
            stream = await self._entrance.open(self._argv(given), user=whose, tty=tty)
            return StreamPipe(
                stream,
                interrupt=lambda: self._request(f"ry_interrupt {mark}", user=whose),
                kill=lambda: self._request(f"ry_kill {mark}", user=whose),
            )

        return await PipeShell.opened(opened)

    # --- processes that outlive the caller

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Start `command` behind a shim of its own session inside. Raises SandboxError."""
        if (await self._report(name))[0] != "none":
            return False
        token = secrets.token_hex(8)
        given = (
            *("shim", name, token, len(command.stdin), self._mark(name), max(1, round(deadline_s * 1000))),
            *(*self._running(None, command.env), *command.argv),
        )
        return await asyncio.shield(self._start(name, token, self._argv(given), command.stdin))

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the shim's word; when the shim is dead without one, kill what it left and say `lost`."""
        pause_s = MIN_POLL_S
        while True:
            state, *rest = await self._patient_report(name)
            if state == "ended":
                status, reason = rest
                await self._forget(name)
                return ProcessEnd(exit_code(int(status)), cast(EndReason, reason))
            if state != "running":
                await self._request(f"ry_kill {self._mark(name)}")
                await self._forget(name)
                return ProcessEnd(None, "lost")
            if (stream := self._started.pop(name, None)) is not None:
                await self._end_of(name, stream)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, MAX_POLL_S)

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """The end of each stream; empty for a process that was never started."""
        async with self._channels.one(self._inside.user, alive=True) as channel:
            code = call_text("ry_output", (name, max_bytes))
            reply = await channel.request(code, timeout_s=REQUEST_S, max_bytes=max_bytes)
            return channel.decoded(reply.stdout), channel.decoded(reply.stderr)

    async def kill(self, name: str) -> None:
        """Kill the process; its shim then writes `killed`."""
        try:
            await self._request(call_text("ry_stop", (name, self._mark(name))))
        except NoRoom:
            await self._kill_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while (await self._patient_report(name))[0] == "running":  # noqa: ASYNC110 - its shim sets no event
                    await asyncio.sleep(MIN_POLL_S)

    # --- how

    async def run_inside(self, code: str) -> str:
        """Run shell code in a channel, as this sandbox's user; its output. For backends. Raises SandboxError."""
        reply = await self._channels.request(self._inside.user, code, timeout_s=REQUEST_S, max_bytes=4096)
        if reply.status != "0":
            raise SandboxError(f"the sandbox cannot be set up: {reply.problem()}")
        return reply.stdout.decode(errors="replace")

    async def _kill_all(self) -> None:
        """Kill all processes from without, when nothing can be run inside. A backend that can do it says how."""
        raise NoRoom("no program can be run in the sandbox, so none can be killed in it", hint="destroy it")

    def _argv(self, given: Sequence[object]) -> list[str]:
        texts = [str(argument) for argument in given]
        check_arguments(texts)
        return inside_argv(self._inside.control, texts, binary=self._entrance.binary)

    def _running(self, cwd: str | None, env: Mapping[str, str] | None) -> list[object]:
        """The last arguments of ry_supervise before the command."""
        assignments = variables({"HOME": self.home, **self._inside.env, **(env or {})})
        blocks = self._inside.max_file_bytes // FILE_BLOCK_BYTES
        return [blocks, posixpath.join(self.workdir, cwd) if cwd else self.workdir, len(assignments), *assignments]

    def _mark(self, name: str) -> int:
        """The same in every worker, so that a process is found even if an agent removed all that we keep."""
        return (1 << 45) + int(digest(self._inside.handle, name, chars=11), 16)

    async def _open_channel(self, user: str) -> Channel:
        # The folders belong to the sandbox's own user.
        folders = (self.home, self.workdir) if user == self._inside.user else ()
        argv = self._argv(("serve", *folders))
        channel = Channel(await self._entrance.open(argv, user=user), binary=self._entrance.binary)
        try:
            reply = await channel.request("ry_hello", timeout_s=HELLO_S, max_bytes=4096)
        except ChannelClosed as error:
            raise NoRoom(
                f"no program can be run in the sandbox: {error.message}",
                hint="its image needs a POSIX sh; if it has one, are its processes or its memory at their limit?",
            ) from error
        except BaseException:
            await asyncio.shield(channel.close())
            raise
        missing, _, problem = reply.stdout.decode(errors="replace").partition("\n")
        if missing.strip() or problem.strip():
            await channel.close()
            if missing.strip():
                raise SandboxError(f"the image lacks {missing.strip()}", hint="a sandbox needs them; see the docs")
            raise SandboxError(f"the sandbox's folders cannot be made: {problem.strip()}")
        return channel

    async def _request(self, code: str, *, user: str | None = None) -> None:
        whose = user or self._inside.user
        await self._channels.request(whose, code, timeout_s=REQUEST_S, max_bytes=4096)

    async def _transfer(self, code: str, data: bytes) -> Reply:
        async with self._channels.one(self._inside.user, alive=True) as channel:
            reply = await channel.request(code, data, timeout_s=TRANSFER_S, max_bytes=4096)
            # What was not taken would be read as the next request.
            channel.usable = channel.usable and reply.status == "0"
            return reply

    async def _start(self, name: str, token: str, argv: list[str], stdin: bytes) -> bool:
        stream = await self._entrance.open(argv, user=self._inside.user)
        said = b""
        try:
            await stream.write(stdin)
            while b"\n" not in said and (piece := await stream.read()) is not None:
                said += piece[1]
        except SandboxError:
            said = b""
        if said.startswith(b"started"):
            self._started[name] = stream
            return True
        await stream.close()
        if said.startswith(b"taken"):
            return False
        # The connection broke: did it start nevertheless?
        async with self._channels.one(self._inside.user, alive=True) as channel:
            code = call_text("ry_claim", (name,))
            reply = await channel.request(code, timeout_s=REQUEST_S, max_bytes=4096)
        if (claimed := reply.stdout.decode(errors="replace").strip()) != token and not claimed:
            raise SandboxError(f"the process {name!r} cannot be started: {said[-300:].decode(errors='replace')}")
        return claimed == token

    async def _report(self, name: str) -> list[str]:
        code = call_text("ry_report", (name,))
        reply = await self._channels.request(self._inside.user, code, timeout_s=REQUEST_S, max_bytes=4096)
        return reply.stdout.decode(errors="replace").split() or ["dead"]

    async def _patient_report(self, name: str) -> list[str]:
        """Like `_report`; a sandbox that is full is asked again, until its processes were ended at their deadline."""
        while True:
            try:
                return await self._report(name)
            except NoRoom:
                await asyncio.sleep(MAX_POLL_S)

    async def _end_of(self, name: str, stream: Stream) -> None:
        """Wait for the end of a shim that this process started. Its stream ends with it."""
        try:
            while await stream.read() is not None:
                pass
        except asyncio.CancelledError:
            self._started[name] = stream  # for the next who waits
            raise
        await stream.close()

    async def _forget(self, name: str) -> None:
        if (stream := self._started.pop(name, None)) is not None:
            await stream.close()


def _new_mark() -> int:
    return (1 << 44) + secrets.randbits(43)
