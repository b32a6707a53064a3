# ruff: noqa: PTH115, PTH208
"""One sandbox as a bubblewrap jail: a pid, mount, network and user namespace that live as long as the sandbox."""

from __future__ import annotations

import array
import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

AGENT: Final = Path(__file__).with_name("agent.py")
HOME: Final = "/home/user"
USERS: Final = {"root": (0, "/root"), "user": (1000, HOME), "nobody": (65534, "/")}
"""Name -> (uid, home). Without root on this machine all of them are the jail's one user."""
_ROOT: Final = os.getuid() == 0
_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")


class JailError(Exception):
    """The jail did not do what was asked. `name` is that of the errno, if there was one."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class Jail:
    """A running jail. `on_exit` is called with the pid (as seen inside) and exit code of each process that ends."""

    def __init__(self, bwrap: asyncio.subprocess.Process, init_pid: int, channel: socket.socket) -> None:
        self._bwrap = bwrap
        self._channel = channel
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self.init_pid = init_pid
        self.on_exit: Callable[[int, int], None] = lambda pid, code: None
        self.ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(channel, self._read)

    @classmethod
    async def start(cls, hosts: Mapping[str, str]) -> Jail:
        """Make a jail whose /etc/hosts knows `hosts` (name -> address)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        status_read, status_write = os.pipe()
        text = "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in hosts.items())
        files = {"/etc/passwd": _memory(_passwd()), "/etc/group": _memory(_group()), "/etc/hosts": _memory(text)}
        try:
            bwrap = await asyncio.create_subprocess_exec(
                *_argv(status_write, files),
                stdin=theirs,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[status_write, *files.values()],
                env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            )
        finally:
            theirs.close()
            for fd in (status_write, *files.values()):
                os.close(fd)
        # Killing bwrap itself in its first milliseconds leaves orphans; killing the pid that it reports does not.
        init_pid = await asyncio.to_thread(_child_pid, status_read)
        jail = cls(bwrap, init_pid, ours)
        await jail.ready.wait()
        if not _ROOT:
            await _open_low_ports(init_pid)
        return jail

    async def ask(self, op: str, fds: Sequence[int] = (), **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """One request to the agent inside; returns its reply and descriptors. Raises JailError."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        memory = _memory(json.dumps({"op": op, "id": number, **fields}))
        try:
            rights = array.array("i", [memory, *fds])
            while True:
                try:
                    self._channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
        except OSError as error:
            del self._asked[number]
            raise JailError(f"the sandbox is gone: {error}") from error
        finally:
            os.close(memory)
        reply, given = await answer
        if "error" in reply:
            raise JailError(reply["error"], reply.get("errno", ""))
        return reply, given

    async def destroy(self) -> None:
        """Kill everything in the jail."""
        with suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)
        with suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
        self._fail()
        await self._bwrap.wait()

    def memory_bytes(self) -> int:
        """Resident memory of the jail's processes."""
        with suppress(OSError):
            namespace = os.readlink(f"/proc/{self.init_pid}/ns/pid")
            return sum(_rss(entry) for entry in os.listdir("/proc") if entry.isdigit() and _in(entry, namespace))
        return 0

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._channel, 1, 8)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                asyncio.get_running_loop().remove_reader(self._channel)
                self._fail()
                return
            with os.fdopen(fds[0], "rb") as memory:
                memory.seek(0)
                message = json.loads(memory.read())
            if "ready" in message:
                self.ready.set()
            elif "exit" in message:
                self.on_exit(message["exit"], message["status"])
            elif (future := self._asked.pop(message["id"], None)) and not future.done():
                future.set_result((message, fds[1:]))

    def _fail(self) -> None:
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(JailError("the sandbox is gone"))


def uid_of(user: str) -> int:
    """Whose a file or process of that user is, as seen in the jail. Raises JailError."""
    if user not in USERS:
        raise JailError(f"invalid username: '{user}'", "EUSER")
    return USERS[user][0] if _ROOT else 1000


def _passwd() -> str:
    return "".join(f"{name}:x:{uid_of(name)}:{uid_of(name)}::{home}:/bin/bash\n" for name, (_, home) in USERS.items())


def _group() -> str:
    return "".join(f"{name}:x:{uid_of(name)}:\n" for name in USERS)


def _argv(status_fd: int, files: Mapping[str, int]) -> list[str]:
    argv = ["bwrap", "--hostname", "e2b", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if _ROOT:
        # Real users need a jail without a user namespace; its root keeps what a daemon needs to be every user.
        argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        for capability in _CAPABILITIES:
            argv += ["--cap-add", f"CAP_{capability}"]
    else:
        argv += ["--unshare-all", "--uid", "1000", "--gid", "1000"]
    argv += ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), f"/{name}"]
        elif path.exists():
            argv += ["--ro-bind", f"/{name}", f"/{name}"]
    for path, fd in files.items():
        argv += ["--perms", "0644", "--ro-bind-data", str(fd), str(path)]
    argv += ["--proc", "/proc", "--dev", "/dev", "--json-status-fd", str(status_fd)]
    for folder, mode in ((HOME, "0755"), ("/root", "0700"), ("/tmp", "1777"), ("/var/tmp", "1777"), ("/opt", "0755")):
        argv += ["--perms", mode, "--dir", folder]
    python = "/usr/bin/python3"
    if not shutil.which(python):
        argv += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        python = str(Path(sys.base_prefix, "bin", "python3"))
    argv += ["--ro-bind", str(AGENT), "/opt/agent.py", "--chdir", "/"]
    return [*argv, "--", python, "-I", "-S", "/opt/agent.py"]


async def _open_low_ports(pid: int) -> None:
    """Let everybody in the jail listen on port 80 of its own network namespace."""
    enter = ["nsenter", "-t", str(pid), "-U", "-n", "--preserve-credentials"]
    low = "echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start"
    opened = await asyncio.create_subprocess_exec(*enter, "sh", "-c", low)
    if await opened.wait():
        raise JailError("the jail's low ports cannot be opened")


def _memory(text: str) -> int:
    fd = os.memfd_create("text")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _child_pid(fd: int) -> int:
    """Reads whole lines, since a short read was seen; the rest of the pipe is left to bubblewrap."""
    with os.fdopen(fd, "rb") as status:
        line = status.readline()
    if not line.endswith(b"\n"):
        raise JailError("bubblewrap could not make a jail")
    return int(json.loads(line)["child-pid"])


def _in(pid: str, namespace: str) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid") == namespace
    return False


def _rss(pid: str) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
