"""A channel into a sandbox: one `sh` inside that stays, and does one request after another (`serve` in inside.sh).

A request is shell code, and bytes for it; the answer is both outputs and a status. What the code prints may be
anything: the answer's end is told by a nonce that only this request knows.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import shlex
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from rollyard.schemas.errors import SandboxError

HELLO_S: Final = 60.0
MAX_LINES: Final = 64
MAX_LINES_BYTES: Final = 8192
MAX_ARGUMENT_BYTES: Final = 131_071  # MAX_ARG_STRLEN of Linux, without the NUL at the end
MAX_IDLE: Final = 2
_PIECE_BYTES: Final = 1 << 18
_SLACK_BYTES: Final = 1 << 16

StreamName = Literal["stdout", "stderr"]


class Stream(Protocol):
    """A program that runs in a sandbox, with its standard input and output."""

    async def write(self, data: bytes) -> None:
        """To its standard input, unchanged. Raises SandboxError when it is gone."""
        ...

    async def read(self) -> tuple[StreamName, bytes] | None:
        """What it wrote next, as soon as there is any; None at its end, also when the connection broke."""
        ...

    async def close(self) -> None:
        """Let go of it; its input ends. It may live on: whoever wants it dead kills it inside. Never raises."""
        ...


class ChannelClosed(SandboxError):
    """The shell inside ended in the middle of a request, or before it."""


class NoRoom(SandboxError):
    """No program can be run in the sandbox now: it lacks sh, or what runs in it has used up all that it may have."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request left. `status` is what its code gave, in most cases a number."""

    status: str
    stdout: bytes
    stderr: bytes

    def problem(self) -> str:
        """What it says on standard error, for a message."""
        return self.stderr[-500:].decode(errors="replace").strip() or f"status {self.status}"


def call_text(function: str, arguments: Iterable[object]) -> str:
    """Shell code that calls a function of inside.sh. Raises SandboxError for what no program can be given."""
    texts = [str(argument) for argument in arguments]
    check_arguments(texts)
    return " ".join([function, *map(shlex.quote, texts)])


def check_arguments(texts: Iterable[str]) -> None:
    """Raises SandboxError for an argument that no program can be given."""
    for text in texts:
        if "\0" in text or len(text.encode(errors="surrogateescape")) > MAX_ARGUMENT_BYTES:
            raise SandboxError(
                f"the command or environment has a part that no program can be given: {text[:60]!r}",
                hint="they hold no NUL, and each argument and variable at most 128 KiB; put more into a file or stdin",
            )


class Channel:
    """For one request at a time. Broken for good after a request that failed or was cancelled."""

    def __init__(self, stream: Stream, *, binary: bool) -> None:
        self._stream = stream
        self._binary = binary
        self.usable = True

    async def request(self, code: str, data: bytes = b"", *, timeout_s: float, max_bytes: int) -> Reply:
        """Run shell code, with `data` as the bytes that it takes. `max_bytes` bounds each stream of the answer.

        Raises ChannelClosed when the shell inside ended; SandboxError when it is too slow or says too much.
        """
        nonce = secrets.token_hex(16)
        usable, self.usable = self.usable, False
        if not usable:
            raise ChannelClosed("the channel into the sandbox is broken")
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(f'{code}\nry_reply {nonce} "${{ry_outcome:-$?}}"', data)
                reply = await self._receive(nonce.encode(), max_bytes)
        except TimeoutError:
            raise SandboxError(
                f"the sandbox gave no answer within {timeout_s:.0f} s", hint="is its machine overloaded?"
            ) from None
        self.usable = True
        return reply

    async def close(self) -> None:
        """End the shell inside, if it waits for a request."""
        self.usable = False
        await self._stream.close()

    async def _send(self, code: str, data: bytes) -> None:
        text = ("ry_outcome=\n" + code).encode(errors="surrogateescape")
        lines = text.count(b"\n") + 1
        if lines <= MAX_LINES and len(text) <= MAX_LINES_BYTES:
            head = b"lines %d\n%s\n" % (lines, text)
        else:
            head = b"bytes %d\n%s" % (len(text), text)
        try:
            await self._stream.write(head + data[:_PIECE_BYTES])
            for start in range(_PIECE_BYTES, len(data), _PIECE_BYTES):
                await self._stream.write(data[start : start + _PIECE_BYTES])
        except SandboxError as error:
            raise ChannelClosed(error.message, hint=error.hint) from error

    async def _receive(self, nonce: bytes, max_bytes: int) -> Reply:
        limit = (max_bytes if self._binary else max_bytes * 3 // 2) + _SLACK_BYTES
        got: dict[StreamName, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        ends: dict[StreamName, int] = {}
        needles: dict[StreamName, bytes] = {"stdout": b"\n" + nonce + b" ", "stderr": b"\n" + nonce + b"\n"}
        while len(ends) < len(got):
            if (piece := await self._stream.read()) is None:
                said = bytes((got["stderr"] or got["stdout"])[-300:]).decode(errors="replace").strip()
                raise ChannelClosed(f"the shell inside the sandbox ended{': ' if said else ''}{said}")
            name, data = piece
            buffer = got[name]
            buffer += data
            if len(buffer) > limit:
                raise SandboxError(f"an answer of the sandbox has over {limit} bytes")
            # The end is the last thing that a request writes: only the tail can hold it.
            at = buffer.rfind(needles[name], max(0, len(buffer) - len(data) - 128))
            if at >= 0 and buffer.endswith(b"\n"):
                ends[name] = at
        status = bytes(got["stdout"][ends["stdout"] + len(needles["stdout"]) :]).decode(errors="replace").strip()
        return Reply(status, bytes(got["stdout"][: ends["stdout"]]), bytes(got["stderr"][: ends["stderr"]]))

    def decoded(self, data: bytes) -> bytes:
        """Bytes that the sandbox's side may have wrapped. Raises SandboxError."""
        if self._binary:
            return data
        try:
            return base64.b64decode(data)
        except binascii.Error as error:
            raise SandboxError(f"the answer of the sandbox is damaged: {error}") from error


class Opener(Protocol):
    """Opens a channel for a user."""

    async def __call__(self, user: str) -> Channel:
        """Raises SandboxError."""
        ...


class Channels:
    """The channels into one sandbox: each caller has one to itself, and the next one finds it ready."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._idle: defaultdict[str, list[Channel]] = defaultdict(list)

    @asynccontextmanager
    async def one(self, user: str, *, alive: bool = False) -> AsyncIterator[Channel]:
        """A channel for the block. With `alive` it was tried just now, so that a request can be sent that may not be
        sent twice. Raises SandboxError when none can be had."""
        channel = await self._take(user, alive=alive)
        try:
            yield channel
        finally:
            idle = self._idle[user]
            if channel.usable and len(idle) < MAX_IDLE:
                idle.append(channel)
            else:
                await asyncio.shield(channel.close())

    async def request(self, user: str, code: str, data: bytes = b"", *, timeout_s: float, max_bytes: int) -> Reply:
        """A request that may be made twice, if the first channel turns out to be dead."""
        try:
            async with self.one(user) as channel:
                return await channel.request(code, data, timeout_s=timeout_s, max_bytes=max_bytes)
        except ChannelClosed:
            async with self.one(user, alive=True) as channel:
                return await channel.request(code, data, timeout_s=timeout_s, max_bytes=max_bytes)

    async def close(self) -> None:
        """Close those that nobody uses."""
        for idle in self._idle.values():
            while idle:
                await idle.pop().close()

    async def _take(self, user: str, *, alive: bool) -> Channel:
        idle = self._idle[user]
        while idle:
            channel = idle.pop()
            if not alive:
                return channel
            try:
                await channel.request(":", timeout_s=HELLO_S, max_bytes=0)
            except ChannelClosed:
                await channel.close()
            else:
                return channel
        return await self._opener(user)
