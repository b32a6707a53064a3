"""Server-sent events, as far as model servers send them. Pure."""

from __future__ import annotations

from typing import Final

MAX_LINE_BYTES: Final = 256 << 20


class EventReader:
    """Takes a stream in blocks of any size and gives the data of each event. `done` is set by `[DONE]`.

    Lines end with LF, CR LF or CR. The data of an event in several lines is joined by LF. Raises ValueError for a line
    that is longer than any reply could be.
    """

    def __init__(self) -> None:
        self.done = False
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, block: bytes) -> list[bytes]:
        """The events that this block completes."""
        if self._after_cr and block.startswith(b"\n"):
            block = block[1:]
            self._after_cr = False
        if not block:
            return []
        self._after_cr = block.endswith(b"\r")
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = block.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._line, lines[0]])
            self._line, self._line_bytes = [], 0
        self._line.append(rest)
        self._line_bytes += len(rest)
        if self._line_bytes > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")
        events = (self._take(line) for line in lines)
        return [event for event in events if event]

    def _take(self, line: bytes) -> bytes | None:
        if line:
            field, _, value = line.partition(b":")
            # llama.cpp has sent errors in a field of their own.
            if field in (b"data", b"error"):
                self._data.append(value.removeprefix(b" "))
            return None
        data = b"\n".join(self._data)
        self._data.clear()
        if data.strip() == b"[DONE]":
            self.done = True
        return None if self.done else data
