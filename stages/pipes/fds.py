"""A pipe of two file descriptors of this process, read and written on the event loop itself.

No thread and no stream object stands between: a round trip through them is most of what a fast command costs.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final

from rollyard.schemas.errors import SandboxError

CHUNK_BYTES: Final = 65_536


class FdPipe:
    """Reads `read_fd` and writes `write_fd`, which may be the same; it owns both. A subclass says how to interrupt
    and to kill what is behind them, and may decode what is read.

    `gone` is the text of the SandboxError that a write to a pipe without reader raises.
    """

    def __init__(self, read_fd: int, write_fd: int, gone: str = "the program in the sandbox has ended") -> None:
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._watched = False
        self._open = True

    async def write(self, data: bytes) -> None:
        """Raises SandboxError when nobody can read it any more."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._writable_fd(), left) :]
            except BlockingIOError:
                await self._writable()
            except OSError as error:
                raise SandboxError(f"{self._gone}: {error.strerror}") from error

    async def read(self) -> bytes:
        """At least one byte; empty at the end, and once the pipe is closed."""
        while self._open:
            try:
                data = os.read(self._read_fd, CHUNK_BYTES)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError:  # a pseudo-terminal gives EIO at its end
                return b""
            if not data or (decoded := self._decode(data)):
                return data and decoded
        return b""

    async def interrupt(self) -> None:
        """Interrupt what runs now."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close both ends. A subclass kills what is behind them as well."""
        if not self._open:
            return
        self._open = False
        self._unwatch()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        for fd in {self._read_fd, self._write_fd}:
            self._loop.remove_writer(fd)
            with suppress(OSError):
                os.close(fd)

    def _decode(self, data: bytes) -> bytes:
        """What the program wrote, of what was read; empty: more is needed."""
        return data

    def _writable_fd(self) -> int:
        if not self._open:
            raise SandboxError(f"{self._gone}: the pipe is closed")
        return self._write_fd

    async def _readable(self) -> None:
        if not self._watched:
            self._loop.add_reader(self._read_fd, self._on_readable)
            self._watched = True
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_readable(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            # Nobody asked: what has come waits in the kernel, which is what stops a flood.
            self._unwatch()

    def _unwatch(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._read_fd)
            self._watched = False

    async def _writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._write_fd, writable.set)
        try:
            await writable.wait()
        finally:
            if self._open:
                self._loop.remove_writer(self._write_fd)
