"""The folder of a machine's relay: its sockets, its lock, and what the next relay needs to know.

    <folder>/shared/gateway.sock   for everybody (0666); the only thing in `shared`, which containers may see
    <folder>/control.sock          for the user of relay and workers (0600)
    <folder>/lock                  held by the relay that runs; says which
    <folder>/doors.json            doors that are open
    <folder>/gateways.json         addresses of the gateways known last

Sockets are bound and reached through /proc/self/fd, so that their paths may be longer than the 107 bytes that the
kernel takes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from rollyard.pipeline.relay import CONTROL_SOCKET
from rollyard.schemas.errors import ConfigError, SetupError

SHARED: Final = "shared"
GATEWAY_SOCKET: Final = "gateway.sock"
LOCK_WAIT_S: Final = 5.0
BACKLOG: Final = 4096
_HINT: Final = "set [relay] folder to one on a local disk"


class RelayFolder:
    """Paths in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.shared = self.root / SHARED
        self.lock = self.root / "lock"
        self.doors = self.root / "doors.json"
        self.gateways = self.root / "gateways.json"

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Make the folder, and be its only relay within the block.

        Waits a moment for one that is about to end. Raises ConfigError when the folder cannot be used, SetupError when
        another relay runs.
        """
        try:
            self.shared.mkdir(parents=True, exist_ok=True)
            # Whatever the umask: agents of any user must get through.
            self.root.chmod(0o755)
            self.shared.chmod(0o755)
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the relay's folder {self.root} cannot be used: {error.strerror}", hint=_HINT) from error
        with os.fdopen(descriptor, "r+") as file:
            deadline = time.monotonic() + LOCK_WAIT_S
            while not _locked(file.fileno()):
                if time.monotonic() > deadline:
                    holder = file.read(200).strip() or "another process"
                    raise SetupError(
                        f"a relay runs already in {self.root}: {holder}",
                        hint="one a machine is enough; stop it first, or set another [relay] folder",
                    )
                await asyncio.sleep(0.05)
            file.seek(0)
            file.truncate()
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    @contextmanager
    def listening(self, folder: Path, name: str, mode: int) -> Iterator[socket.socket]:
        """A unix socket that listens at `folder`/`name`, in place of what a dead relay left there; removed at the end.

        Raises ConfigError.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        aside = f".{name}.{os.getpid()}"
        try:
            directory = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=directory)
                sock.bind(f"/proc/self/fd/{directory}/{aside}")
                os.chmod(aside, mode, dir_fd=directory)
                sock.listen(BACKLOG)
                sock.setblocking(False)
                # By a rename, so that at no time there is none.
                os.rename(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
            finally:
                os.close(directory)
        except OSError as error:
            sock.close()
            raise ConfigError(f"no socket can be made at {folder / name}: {error.strerror}", hint=_HINT) from error
        try:
            yield sock
        finally:
            sock.close()
            with suppress(OSError):
                (folder / name).unlink()

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection to the control socket. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            directory = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory}/{CONTROL_SOCKET}")
            finally:
                os.close(directory)
        except OSError:
            sock.close()
            raise
        return sock


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def keep(path: Path, value: Any) -> None:
    """Write a value as JSON, so that a reader sees the old one or the new one. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(msgspec.json.encode(value))
    aside.replace(path)


def kept(path: Path, kind: type[Any]) -> Any:
    """What was kept, as `kind`; None when there is nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
