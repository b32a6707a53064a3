"""One connection of an agent, carried to a gateway: bytes both ways, as they come, no faster than the other side reads.

An end of one direction is passed on as such, a broken connection as a broken one: an agent must never take half a reply
for a whole one.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from rollyard.gateway.relay.refusal import Refuser

RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets
KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
UNACKED_MS: Final = 30_000
AFTER_END_S: Final = 60.0
"""How long an agent may leave a connection open whose gateway has ended it."""


class Side(asyncio.Protocol):
    """One of the two ends. `transport` is there from when it is connected."""

    __slots__ = ("_connection", "early", "ended", "lost", "other", "transport")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self.early = b""  # came before the other side was there
        self.ended = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast(asyncio.Transport, transport)
        self._connection.made(self)

    def data_received(self, data: bytes) -> None:
        """Pass them on; before the other side is there, keep what came and read no more."""
        other = self.other
        if other is None:
            self.early += data
            if self.transport is not None:
                self.transport.pause_reading()
        elif other.transport is not None and not other.lost:
            self._connection.heard(self)
            other.transport.write(data)

    def eof_received(self) -> bool:
        """Pass the end of this direction on; the other one goes on."""
        self.ended = True
        other = self.other
        if other is None:
            # Passed on as soon as there is another side.
            return True
        if other.transport is None or other.lost:
            return False
        if other.ended or not other.transport.can_write_eof():
            # Both directions are at their end, or TLS, which has no half of a connection.
            other.transport.close()
            return False
        other.transport.write_eof()
        if self is self._connection.gateway:
            self._connection.expire(AFTER_END_S)
        return True

    def pause_writing(self) -> None:
        """This side reads slowly: so does the other, then."""
        if self.other is not None and self.other.transport is not None and not self.other.lost:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """See pause_writing."""
        if self.other is not None and self.other.transport is not None and not self.other.lost:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """With this side the other ends: in the same way."""
        self.lost = True
        self._connection.lost(self)
        other, self.other = self.other, None
        if other is not None and other.transport is not None and not other.lost:
            if exc is not None and not self.ended:
                reset(other.transport)
            else:
                other.transport.close()


class Connection:
    """Both sides, and how they stand. `on_made` is called when the agent is there, `on_lost` when it has gone."""

    __slots__ = ("_loop", "_on_lost", "_on_made", "_timer", "agent", "asking", "gateway", "heard_s", "key", "url")

    def __init__(self, on_made: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_made = on_made
        self._on_lost = on_lost
        self._timer: asyncio.TimerHandle | None = None
        self.agent = Side(self)
        self.gateway: Side | None = None
        self.key = ""
        self.url = ""
        self.asking = False  # the last word was the agent's
        self.heard_s = self._loop.time()

    def gateway_side(self) -> Side:
        """A fresh side for one try to reach a gateway."""
        self.gateway = Side(self)
        return self.gateway

    def join(self, url: str) -> None:
        """Both are there: let the bytes flow."""
        gateway, agent = self.gateway, self.agent
        assert gateway is not None and gateway.transport is not None and agent.transport is not None
        self.url = url
        keep_alive(gateway.transport)
        agent.other, gateway.other = gateway, agent
        if gateway.lost or agent.lost:
            self.abort()
            return
        for side in (gateway, agent):
            early, side.early = side.early, b""
            if early:
                side.data_received(early)
            if side.ended and not side.eof_received():
                agent.transport.close()
                return
        gateway.transport.resume_reading()
        agent.transport.resume_reading()

    def turn_away(self, refuser: Refuser) -> None:
        """Let the agent be told that there is no gateway."""
        if self.agent.transport is not None and not self.agent.lost:
            refuser.attach(self.agent.transport, self.agent.connection_lost)
            refuser.data_received(self.agent.early)

    def made(self, side: Side) -> None:
        """A side is connected."""
        if side is self.agent:
            self._on_made(self)

    def lost(self, side: Side) -> None:
        """A side is gone."""
        if side is self.agent:
            if self._timer is not None:
                self._timer.cancel()
            self._on_lost(self)

    def heard(self, side: Side) -> None:
        """A side said something."""
        self.asking = side is self.agent
        self.heard_s = self._loop.time()

    def idle_s(self) -> float:
        """How long nothing was said since the gateway's last word; 0 while the agent waits for an answer."""
        return 0.0 if self.asking else self._loop.time() - self.heard_s

    def expire(self, after_s: float) -> None:
        """End it after so long, whatever happens."""
        if self._timer is None:
            self._timer = self._loop.call_later(after_s, self.abort)

    def abort(self) -> None:
        """Break both sides."""
        for side in (self.agent, self.gateway):
            if side is not None and side.transport is not None and not side.lost:
                reset(side.transport)


def reset(transport: asyncio.Transport) -> None:
    """Close so that the peer sees a broken connection, where the transport can say that."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


def keep_alive(transport: asyncio.Transport) -> None:
    """Notice a gateway whose machine has gone."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MS)
