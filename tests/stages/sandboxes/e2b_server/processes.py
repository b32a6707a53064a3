# ruff: noqa: PTH118, PTH123
"""The processes of one sandbox, and who listens to their output.

As under E2B's own daemon: a command lives on when the client that started it goes away; it is killed at its deadline,
alone, not what it started; it has ended when its output is closed too; nobody gets output from before they listened;
how it ended is told for 30 s afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from e2b_server.jail import USERS, Jail, JailError, uid_of

CHUNK_BYTES: Final = 32 << 10
RETAIN_S: Final = 30.0
_QUEUE: Final = 64


class Listener:
    """The events of one process from now on; `None` is the end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_QUEUE)
        self.gone = False

    async def put(self, event: dict[str, Any] | None) -> None:
        """Waits while the listener is slow, as the command does then."""
        if not self.gone:
            await self.queue.put(event)

    def leave(self) -> None:
        """Nobody reads any more."""
        self.gone = True
        while not self.queue.empty():
            self.queue.get_nowait()


class Process:
    """One command."""

    def __init__(self, pid: int, config: Mapping[str, Any], tag: str | None) -> None:
        self.pid = pid
        self.config = config
        self.tag = tag
        self.stdin: int | None = None
        self.pty: int | None = None
        self.listeners: list[Listener] = []
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.killed = asyncio.Event()
        self.end: dict[str, Any] | None = None

    def listen(self) -> Listener:
        """A new listener; it gets the end at once if there was one."""
        listener = Listener()
        if self.end is not None:
            listener.queue.put_nowait(self.end)
            listener.queue.put_nowait(None)
        else:
            self.listeners.append(listener)
        return listener

    async def say(self, event: dict[str, Any] | None) -> None:
        """Tell all listeners."""
        for listener in list(self.listeners):
            await listener.put(event)

    async def write(self, data: bytes) -> None:
        """To its standard input or terminal."""
        fd = self.stdin if self.pty is None else self.pty
        if fd is None:
            raise JailError("stdin not enabled or closed")
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError as error:
                raise JailError(f"error writing to stdin: {error}") from error

    def close_stdin(self) -> None:
        """End of its standard input."""
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None

    def resize(self, rows: int, cols: int) -> None:
        """Size of its terminal."""
        if self.pty is not None:
            fcntl.ioctl(self.pty, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


class Processes:
    """All processes of one jail."""

    def __init__(self, jail: Jail, env: Mapping[str, str]) -> None:
        self._jail = jail
        self._env = env
        self._all: dict[int, Process] = {}
        self._early: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        jail.on_exit = self._on_exit

    def running(self) -> list[Process]:
        """Those that have not ended."""
        return [process for process in self._all.values() if process.end is None]

    def find(self, selector: Mapping[str, Any], *, ended: bool = False) -> Process | None:
        """By pid or tag; with `ended`, one that ended lately too."""
        for process in self._all.values():
            if process.pid == int(selector.get("pid") or 0) or (process.tag and process.tag == selector.get("tag")):
                return process if ended or process.end is None else None
        return None

    async def start(self, ask: Mapping[str, Any], user: str, timeout_s: float) -> tuple[Process, Listener]:
        """Start a command. Raises JailError for a working directory that is not there."""
        config = ask["process"]
        uid, home = uid_of(user), USERS[user][1]
        cwd = os.path.join(home, config.get("cwd") or "")
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home}
        env |= {"USER": user, "LOGNAME": user, **self._env, **config.get("envs", {})}
        argv = [config["cmd"], *config.get("args", [])]
        given, kept = _terminal(ask["pty"]) if ask.get("pty") else _pipes(stdin=ask.get("stdin", True))
        try:
            reply, _ = await self._jail.ask(
                "start", given, argv=argv, env=env, cwd=os.path.normpath(cwd), pty=bool(ask.get("pty")), uid=uid
            )
        except JailError:
            for fd in kept.values():
                os.close(fd)
            raise
        finally:
            for fd in set(given):
                os.close(fd)
        process = Process(reply["pid"], config, ask.get("tag"))
        process.stdin, process.pty = kept.get("stdin"), kept.get("pty")
        self._all[process.pid] = process
        listener = process.listen()
        if (code := self._early.pop(process.pid, None)) is not None:
            process.exited.set_result(code)
        self._background(self._follow(process, kept, timeout_s))
        return process, listener

    async def kill(self, process: Process, number: int) -> None:
        """Send a signal to the command alone."""
        process.killed.set()
        await self._jail.ask("signal", pid=process.pid, signal=number)

    async def run(self, argv: Sequence[str], stdin: int, stdout: int) -> int:
        """A command of the server's own, between two open files; its exit code."""
        with open(os.devnull, "wb") as nothing:
            reply, _ = await self._jail.ask(
                "start", [stdin, stdout, nothing.fileno()], argv=list(argv), env={}, cwd="/", pty=False, uid=0
            )
        process = self._all[reply["pid"]] = Process(reply["pid"], {"cmd": argv[0]}, None)
        if (code := self._early.pop(process.pid, None)) is not None:
            process.exited.set_result(code)
        code = await process.exited
        del self._all[process.pid]
        return code

    def mute(self) -> None:
        """Nobody who listens hears of what happens from now on."""
        for process in self._all.values():
            process.listeners.clear()

    async def close(self) -> None:
        """The jail is gone: end what follows its processes."""
        everyone = list(self._all.values())
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in everyone:
            process.close_stdin()
            await asyncio.wait_for(process.say(None), 1)

    def _on_exit(self, pid: int, code: int) -> None:
        process = self._all.get(pid)
        if process is None or process.exited.done():
            self._early[pid] = code
        else:
            process.exited.set_result(code)

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, process: Process, kept: Mapping[str, int], timeout_s: float) -> None:
        names = [name for name in ("stdout", "stderr", "pty") if name in kept]
        readers = [asyncio.create_task(_copy(process, name, kept[name])) for name in names]
        output = asyncio.gather(*readers, return_exceptions=True)
        killed = asyncio.create_task(process.killed.wait())
        try:
            done, _ = await asyncio.wait([output, killed], timeout=timeout_s or None, return_when="FIRST_COMPLETED")
            if not done:
                with suppress(JailError):
                    await self.kill(process, signal.SIGKILL)
            code = await process.exited
            # What the command wrote before it was killed still counts; what others write into its pipes does not.
            await asyncio.wait(readers, timeout=0.05)
            process.end = {"event": {"end": _end(code)}}
            await process.say(process.end)
            await process.say(None)
            process.listeners.clear()
            await asyncio.sleep(RETAIN_S)
        finally:
            killed.cancel()
            for reader in readers:
                reader.cancel()
            if self._all.get(process.pid) is process:
                del self._all[process.pid]


async def _copy(process: Process, name: str, fd: int) -> None:
    """From a pipe or terminal to the listeners, to its end."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        while True:
            try:
                data = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                readable.clear()
                await readable.wait()
                continue
            except OSError:  # of a terminal whose other side is closed
                return
            if not data:
                return
            await process.say({"event": {"data": {name: base64.b64encode(data).decode()}}})
    finally:
        loop.remove_reader(fd)
        os.close(fd)
        process.pty = None


def _pipes(*, stdin: bool) -> tuple[list[int], dict[str, int]]:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    kept = {"stdout": out_read, "stderr": err_read}
    if stdin:
        in_read, kept["stdin"] = os.pipe()
        os.set_blocking(kept["stdin"], False)
    else:
        in_read = os.open(os.devnull, os.O_RDONLY)
    return [in_read, out_write, err_write], kept


def _terminal(ask: Mapping[str, Any]) -> tuple[list[int], dict[str, int]]:
    ours, theirs = os.openpty()
    size = ask.get("size", {})
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.get("rows", 24), size.get("cols", 80), 0, 0))
    return [theirs, theirs, theirs], {"pty": ours}


def _end(code: int) -> dict[str, Any]:
    """As Go tells it: -1 for what a signal killed."""
    if code < 0:
        name = {9: "killed", 15: "terminated"}.get(-code, f"signal {-code}")
        return {"exitCode": -1, "exited": False, "status": f"signal: {name}", "error": f"signal: {name}"}
    end: dict[str, Any] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return end | ({"error": f"exit status {code}"} if code else {})
