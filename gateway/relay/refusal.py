"""What an agent is told when no gateway takes its connection: an HTTP answer, in the shape of the API that it asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, cast

from rollyard.gateway.protocols import protocol_of
from rollyard.gateway.refusal import unavailable

MAX_HEAD_BYTES: Final = 65_536
HEAD_S: Final = 10.0
LINGER_S: Final = 5.0
RETRY_AFTER_S: Final = 2


class Refuser(asyncio.Protocol):
    """Waits for the head of a request, since a client may take an answer that comes before its question for a fault.

    After the answer it reads on for a while: closing with bytes unread would take the answer back.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._head = bytearray()
        self._answered = False
        self._transport: asyncio.Transport | None = None
        self._lost: Callable[[Exception | None], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, transport: asyncio.Transport, lost: Callable[[Exception | None], None]) -> None:
        """Take a connection over; `lost` is called at its end."""
        self._transport = transport
        self._lost = lost
        transport.set_protocol(self)
        self._close_in(HEAD_S)
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Answer when the head is whole; drop what comes later."""
        if self._answered or self._transport is None:
            return
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > MAX_HEAD_BYTES:
            self._answered = True
            self._transport.write(answer(bytes(self._head), self._why))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._close_in(LINGER_S)

    def eof_received(self) -> bool:
        """The client has said all, or read all."""
        if self._transport is not None:
            self._transport.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._timer is not None:
            self._timer.cancel()
        if self._lost is not None:
            self._lost(exc)

    def _close_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        transport = cast(asyncio.Transport, self._transport)
        self._timer = asyncio.get_running_loop().call_later(delay_s, transport.abort)


def answer(head: bytes, why: str) -> bytes:
    """The whole HTTP answer to a request that begins so."""
    target = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
    path = target[0].decode(errors="replace") if target else ""
    refusal = unavailable(
        why, code="no_gateway", hint="the same request may be fine in a moment", retry_after_s=RETRY_AFTER_S
    )
    status, body = protocol_of(path).refuse(refusal)
    phrase = next((each.phrase for each in HTTPStatus if each.value == status), "Overloaded")
    lines = [
        f"HTTP/1.1 {status} {phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in refusal.headers().items()),
        "Connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
