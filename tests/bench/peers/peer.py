"""What is compared: one Protocol, and the peers that are scripts of this folder."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from peers.process import started

from rollyard.pipeline.embedded import free_port

HERE: Final = Path(__file__).parent
CHAT: Final = "/v1/chat/completions"


@dataclass(frozen=True)
class Door:
    """Where one client of a peer sends its requests."""

    port: int
    path: str
    headers: dict[str, str]


@dataclass(frozen=True)
class World:
    """What the peers stand in."""

    folder: Path
    stub_port: int
    nats_url: str

    @property
    def stub_url(self) -> str:
        return f"http://127.0.0.1:{self.stub_port}"


class Peer(Protocol):
    """Something between client and stub."""

    name: str
    captures: bool
    """Whether it keeps the calls, ids included."""
    streams: bool
    plain: bool
    """Whether it can do without ids."""
    continues: bool
    """Whether its clients send later turns of a conversation, not a new one each time."""
    slow: bool
    """Measured in one round only."""

    @property
    def pids(self) -> list[int]:
        """Its processes, without their children; none: it costs nothing."""
        ...

    async def door(self, client: int, model: str) -> Door:
        """A door of its own for a client of one load."""
        ...

    async def leave(self) -> None:
        """The load is over: nobody comes to these doors again."""
        ...


@dataclass
class PlainPeer:
    """See Peer. One address for everybody."""

    name: str
    port: int
    pids: list[int]
    captures: bool = False
    streams: bool = True
    plain: bool = True
    continues: bool = False
    slow: bool = False
    key: str = ""

    async def door(self, client: int, model: str) -> Door:
        """See Peer."""
        return Door(self.port, CHAT, {"Authorization": f"Bearer {self.key}"} if self.key else {})

    async def leave(self) -> None:
        """See Peer."""


def direct(world: World) -> PlainPeer:
    """No peer at all."""
    return PlainPeer("direct", world.stub_port, [])


@asynccontextmanager
async def bare(world: World) -> AsyncIterator[PlainPeer]:
    """The reverse proxy."""
    port = free_port()
    command = [sys.executable, str(HERE / "bare.py"), str(port), world.stub_url]
    async with started(command, world.folder / "bare.log", port) as pid:
        yield PlainPeer("bare", port, [pid])


@asynccontextmanager
async def floor(world: World) -> AsyncIterator[PlainPeer]:
    """The reverse proxy that records."""
    port = free_port()
    command = [sys.executable, str(HERE / "floor.py"), str(port), world.stub_url, world.nats_url]
    async with started(command, world.folder / "floor.log", port) as pid:
        yield PlainPeer("floor", port, [pid], captures=True)
