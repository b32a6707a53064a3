"""What comes out of a shell channel: output, and frames between which a shell tells how commands ended. Pure.

A frame starts with the byte 0x1e and the shell's prefix:

    1e PREFIX " " NONCE " " CODE 1e DIRECTORY 00 DECLARATIONS 1e PREFIX " " NONCE 1e     a command ended
    1e PREFIX " exit " CODE 1e DIRECTORY 00 DECLARATIONS 1e PREFIX " exit" 1e            the shell is about to end
    1e PREFIX " exited " CODE 1e                                                         it has ended

The agent's programs can print anything, and background jobs between the bytes of a frame as well. The start of a
frame is one write that the kernel keeps together. The nonce of the command under way is known to nobody else; all that
does not read as a frame is output.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Final

from rollyard.stages.shell_state import ShellState

START: Final = b"\x1e"
EXIT: Final = b"exit"
MAX_HEADER_BYTES: Final = 128
MAX_STATE_BYTES: Final = 4 << 20

_HEADER: Final = re.compile(rb" ([a-z0-9]+) ([0-9]{1,3})\x1e")


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """A command ended; `code` is its `$?`."""

    code: int


@dataclass(frozen=True, slots=True)
class ShellEnd:
    """The shell ended; `code` is None when nobody told it."""

    code: int | None


class Tail:
    """The last `max_bytes` of what is added. It holds one added piece more than that at most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._seen = 0

    def add(self, piece: bytes) -> None:
        """Add what came."""
        self._pieces.append(piece)
        self._seen += len(piece)
        self._held += len(piece)
        while self._held - len(self._pieces[0]) >= self._max_bytes and len(self._pieces) > 1:
            self._held -= len(self._pieces.popleft())

    @property
    def truncated(self) -> bool:
        """Whether more came than is kept."""
        return self._seen > self._max_bytes

    def bytes(self) -> bytes:
        """What is kept."""
        joined = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return joined[len(joined) - self._max_bytes :] if len(joined) > self._max_bytes else joined


class Frames:
    """Reads one shell's channel. `state` is the last that the shell told whole; None: none yet."""

    def __init__(self, prefix: bytes) -> None:
        self.state: ShellState | None = None
        self._start = START + prefix
        self._waiting = b""  # the beginning of what may be a frame
        self._block: bytes | None = None  # the end for which a state block waits
        self._searched = 0

    def feed(self, data: bytes, nonce: bytes, output: Tail) -> CommandEnd | ShellEnd | None:
        """Add what was read while the command of `nonce` was under way; output goes to `output`. How the command or
        the shell ended, or None: more must be read. What follows such an end is kept for the next call."""
        self._waiting = self._waiting + data if self._waiting else data
        while True:
            if self._block is not None and not self._end_of_block(output):
                return None
            if not self._waiting:
                return None
            at = self._waiting.find(self._start)
            if at < 0:
                self._give(len(self._waiting) - self._maybe_start(), output)
                return None
            self._give(at, output)
            header = _HEADER.match(self._waiting, len(self._start))
            if header is None:
                if len(self._waiting) < len(self._start) + MAX_HEADER_BYTES and self._may_grow():
                    return None
                self._give(len(self._start), output)
                continue
            if (end := self._take(header, nonce, output)) is not None:
                return end

    def drain(self, output: Tail) -> None:
        """No more comes: what waits is output, unless it is part of a state block."""
        if self._block is None:
            self._give(len(self._waiting), output)
        self._waiting, self._block = b"", None

    def _take(self, header: re.Match[bytes], nonce: bytes, output: Tail) -> CommandEnd | ShellEnd | None:
        kind, code = header[1], int(header[2])
        if kind == b"exited":
            self._waiting = self._waiting[header.end() :]
            return ShellEnd(code)
        if kind not in (nonce, EXIT):
            self._give(header.end() - len(START), output)  # its last byte may begin a true one
            return None
        self._waiting = self._waiting[header.end() :]
        self._block = self._start + b" " + kind + START
        self._searched = 0
        return CommandEnd(code) if kind == nonce else None

    def _end_of_block(self, output: Tail) -> bool:
        """Whether the state block has ended; it is taken then, and what a background job wrote into it is output."""
        assert self._block is not None
        at = self._waiting.find(self._start, self._searched)
        if at < 0:
            self._searched = max(0, len(self._waiting) - len(self._start))
            if len(self._waiting) <= MAX_STATE_BYTES:
                return False
            at = len(self._waiting)
        if not self._waiting.startswith(self._block, at):
            rest = self._waiting[at:]
            if rest and self._block.startswith(rest):
                self._searched = at
                return False
            # The shell was killed inside its block, of which its parent tells; or it was never a block.
            self._waiting, self._block = rest, None
            return True
        block, self._waiting = self._waiting[:at], self._waiting[at + len(self._block) :]
        self._block = None
        if self.state is None or self.state.told != block:
            state, noise = ShellState.read(block)
            self.state = state or self.state
            if noise:
                output.add(noise)
        return True

    def _give(self, count: int, output: Tail) -> None:
        if count:
            output.add(self._waiting[:count])
            self._waiting = self._waiting[count:]

    def _maybe_start(self) -> int:
        """Bytes at the end that may begin a frame."""
        tail = self._waiting[-len(self._start) + 1 :]
        at = tail.find(START)
        while at >= 0:
            if self._start.startswith(tail[at:]):
                return len(tail) - at
            at = tail.find(START, at + 1)
        return 0

    def _may_grow(self) -> bool:
        """Whether what follows the start of a frame lacks only its end."""
        rest = self._waiting[len(self._start) :]
        return re.fullmatch(rb"( ([a-z0-9]*( [0-9]{0,3})?)?)?", rest) is not None
