"""The process that keeps a bubblewrap sandbox's files and network: starting it, and finding it again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.census import VARIABLE, at_work
from rollyard.stages.sandboxes.shim import DATA_FD, DEFAULT_SIGNALS, living_pid, lock_shared, start_time

READY: Final = b"ready\n"
READY_S: Final = 60.0
RECORD: Final = "holder"
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SAID_BYTES: Final = 4096
END_LOOKS: Final = 50
END_PAUSE_S: Final = 0.001


class Holder:
    """The holder of the sandbox in `folder`. Its record there is one line: "PID START_TIME BOOT"."""

    def __init__(self, folder: Path, boot_id: str) -> None:
        self._record = folder / RECORD
        self._boot_id = boot_id

    def pid(self) -> int | None:
        """Its process id while it lives."""
        return living_pid(self._record, self._boot_id)

    def spawn(self, line: Sequence[str], mark: str, lock: Path | None) -> tuple[int, int]:
        """Start it; returns its process id, and what to hand to `ready`. Raises OSError."""
        reader, writer = os.pipe()
        files = [writer]
        try:
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_DUP2, writer, 2),
            ]
            if lock is not None:
                files.append(lock_shared(lock))
                actions.append((os.POSIX_SPAWN_DUP2, files[-1], DATA_FD))
            pid = os.posix_spawn(
                line[0],
                list(line),
                {"PATH": PATH, VARIABLE: mark},
                file_actions=actions,
                setsid=True,
                setsigdef=DEFAULT_SIGNALS,
                setsigmask=(),
            )
            self._record.write_text(f"{pid} {start_time(str(pid))} {self._boot_id}\n")
        except BaseException:
            os.close(reader)
            raise
        finally:
            for file in files:
                os.close(file)
        return pid, reader

    async def ready(self, reader: int) -> None:
        """Wait until all is mounted. Raises SandboxError with what it said."""
        said = b""
        try:
            async with asyncio.timeout(READY_S):
                while not said.endswith(READY) and len(said) < SAID_BYTES:
                    await _readable(reader)
                    if not (data := os.read(reader, SAID_BYTES)):
                        break
                    said += data
        except TimeoutError as error:
            raise SandboxError(
                f"a sandbox was not ready after {READY_S:g} s", hint="is the machine overloaded?"
            ) from error
        finally:
            os.close(reader)
        if not said.endswith(READY):
            text = said.decode(errors="replace").strip()
            raise SandboxError(f"the sandbox cannot be made: {text or 'its holder ended'}")

    async def kill(self) -> None:
        """End it, and wait a moment until it has ended. What has entered by then lives on until it is killed too."""
        if (pid := self.pid()) is None:
            return
        for kill in (os.kill, os.killpg):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        for _ in range(END_LOOKS):
            if not at_work(str(pid)):
                return
            await asyncio.sleep(END_PAUSE_S)


async def _readable(file: int) -> None:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not waiter.done():
            waiter.set_result(None)

    loop.add_reader(file, on_readable)
    try:
        await waiter
    finally:
        loop.remove_reader(file)
