"""Carries connections to gateways: finds one that takes the connection, before a byte of it was read."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Final

import structlog

from rollyard.gateway.relay.choice import Choice
from rollyard.gateway.relay.connection import Connection, Side
from rollyard.gateway.relay.gateways import GatewayAddress, KnownGateways
from rollyard.gateway.relay.refusal import Refuser

log = structlog.get_logger(__name__)

CONNECT_S: Final = 3.0
PATIENCE_S: Final = 5.0
"""How long a connection waits for a gateway: about what the restart of one takes."""
PAUSE_S: Final = 0.2
MAX_PER_SANDBOX: Final = 256
"""Connections; an agent that opens more shall not take those of others."""
IDLE_S: Final = 2.0


class Carrier:
    """All connections of one relay."""

    def __init__(self, gateways: KnownGateways, patience_s: float = PATIENCE_S) -> None:
        self.gateways = gateways
        self.choice = Choice()
        self.connections: set[Connection] = set()
        self.carried = 0
        self.turned_away = 0
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._per_key: Counter[str] = Counter()
        self._connecting: set[asyncio.Task[None]] = set()

    def for_door(self, key: str) -> Callable[[], Side]:
        """Protocols for the connections of the sandbox `key`, which `choice` remembers until it is told to forget."""

        def made(connection: Connection) -> None:
            connection.key = key
            self._came(connection)

        return lambda: Connection(made, self._went).agent

    def for_socket(self) -> Callable[[], Side]:
        """Protocols for the connections at a unix socket, whose clients the kernel tells apart."""

        def made(connection: Connection) -> None:
            transport = connection.agent.transport
            assert transport is not None
            connection.key = _peer(transport.get_extra_info("socket"))
            self._came(connection)

        def lost(connection: Connection) -> None:
            self._went(connection)
            if not self._per_key[connection.key]:
                self.choice.forget(connection.key)

        return lambda: Connection(made, lost).agent

    def _came(self, connection: Connection) -> None:
        self._per_key[connection.key] += 1
        self.connections.add(connection)
        if self._per_key[connection.key] > MAX_PER_SANDBOX:
            log.warning("too_many_connections", sandbox=connection.key, limit=MAX_PER_SANDBOX)
            connection.abort()
            return
        task = self._loop.create_task(self._carry(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _went(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._per_key[connection.key] -= 1
        if self._per_key[connection.key] <= 0:
            del self._per_key[connection.key]

    async def _carry(self, connection: Connection) -> None:
        deadline = self._loop.time() + self._patience_s
        while not connection.agent.lost:
            if await self._reached(connection):
                self.carried += 1
                return
            if self._loop.time() > deadline:
                self._refuse(connection)
                return
            await asyncio.sleep(PAUSE_S)

    async def _reached(self, connection: Connection) -> bool:
        """One round over all gateways."""
        known = {address.url: address for address in self.gateways.addresses()}
        for url in self.choice.order(connection.key, list(known), self._loop.time()):
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._connect(known[url], connection)
            except (OSError, TimeoutError) as error:
                if self.choice.refused(url, self._loop.time()):
                    log.warning("gateway_not_reached", url=url, error=str(error) or type(error).__name__)
                if connection.agent.lost:
                    return True
                continue
            self.choice.took(connection.key, url)
            connection.join(url)
            return True
        return False

    async def _connect(self, address: GatewayAddress, connection: Connection) -> None:
        tls = self.gateways.tls if address.tls else None
        await self._loop.create_connection(connection.gateway_side, address.host, address.port, ssl=tls)

    def _refuse(self, connection: Connection) -> None:
        self.turned_away += 1
        unusable = self.gateways.refused()
        why = "; ".join(unusable) if unusable else "the relay of this machine reaches no gateway"
        log.warning("turned_away", sandbox=connection.key, why=why)
        connection.turn_away(Refuser(why))

    async def drain(self, within_s: float) -> None:
        """Let agents have the answers that they wait for, for so long; then break what is left."""
        deadline = self._loop.time() + within_s
        while self.connections and self._loop.time() < deadline:
            for connection in list(self.connections):
                if connection.idle_s() > IDLE_S:
                    connection.abort()
            await asyncio.sleep(0.05)
        for task in self._connecting:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        if self._connecting:
            await asyncio.wait(self._connecting)
        while self.connections and self._loop.time() < deadline + 1:  # noqa: ASYNC110 - the loop has to tell them
            await asyncio.sleep(0)


@cache
def _own_network() -> str:
    return os.readlink("/proc/self/ns/net")  # noqa: PTH115


def _peer(sock: socket.socket) -> str:
    """Which sandbox the process at the other end of a unix socket is in: its network if it has one of its own."""
    pid, uid, _ = struct.unpack("iii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        netns = os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115 - for each connection, and pathlib costs four times it
        if netns != _own_network():
            return netns
    except OSError:
        # Somebody else's process, or one of another machine's view.
        pass
    return f"process {pid} of {uid}"
