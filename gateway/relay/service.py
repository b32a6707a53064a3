"""A relay process: its sockets, the gateways it knows, its doors; started and stopped in order."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import structlog

from rollyard.gateway.relay.carrier import PATIENCE_S, Carrier
from rollyard.gateway.relay.control import Answer, ControlServer, Request
from rollyard.gateway.relay.doors import Doors, Holder
from rollyard.gateway.relay.folder import BACKLOG, GATEWAY_SOCKET, RelayFolder
from rollyard.gateway.relay.gateways import KnownGateways
from rollyard.pipeline.config import Config
from rollyard.pipeline.relay import CONTROL_SOCKET
from rollyard.pipeline.streams import Limits
from rollyard.pipeline.watching import watching

log = structlog.get_logger(__name__)

DRAIN_S: Final = 20.0
IDLE_LOOK_S: Final = 1.0


class Relay:
    """A relay that serves. Make one with `async with relay_service(...) as relay`."""

    def __init__(self, folder: RelayFolder, gateways: KnownGateways, patience_s: float) -> None:
        self.folder = folder
        self.gateways = gateways
        self.incarnation = uuid4().hex
        self.carrier = Carrier(gateways, patience_s)
        self.doors = Doors(folder, self.carrier)
        self._asked_s = asyncio.get_running_loop().time()

    async def answer(self, request: Request, passed: socket.socket | None) -> Answer:
        """What the control socket says to a request. Raises SandboxError."""
        self._asked_s = asyncio.get_running_loop().time()
        missing: tuple[str, ...] = ()
        match request.do:
            case "open":
                await self.doors.open(request.key, Holder(request.holder, request.netns), passed)
            case "close":
                self.doors.close(request.key)
            case "missing":
                missing = self.doors.missing(request.keys)
        return Answer(
            incarnation=self.incarnation,
            missing=missing,
            gateways=tuple(address.url for address in self.gateways.addresses()),
            refused=tuple(self.gateways.refused()),
            doors=len(self.doors),
            connections=len(self.carrier.connections),
            carried=self.carrier.carried,
            turned_away=self.carrier.turned_away,
        )

    def idle_s(self) -> float:
        """How long nobody had a use for this relay."""
        now_s = asyncio.get_running_loop().time()
        if len(self.doors) or self.carrier.connections:
            self._asked_s = now_s
        return now_s - self._asked_s


@asynccontextmanager
async def relay_service(
    folder: Path, nats_url: str, limits: Limits, *, drain_s: float = DRAIN_S, patience_s: float = PATIENCE_S
) -> AsyncIterator[Relay]:
    """A relay that serves until the block ends. Raises ConfigError or SetupError when `folder` cannot be used.

    At the end it takes no more connections, and lets agents have the answers that they wait for.
    """
    gateways = KnownGateways(RelayFolder(folder).gateways)
    async with (
        _serving(folder, gateways, drain_s, patience_s) as relay,
        _beside(gateways.follow(nats_url, limits)),
    ):
        yield relay


@asynccontextmanager
async def fixed_relay(
    folder: Path, urls: Sequence[str], *, drain_s: float = DRAIN_S, patience_s: float = PATIENCE_S
) -> AsyncIterator[Relay]:
    """A relay to gateways that are named, without a bus: for trying sandboxes. Otherwise as `relay_service`."""
    gateways = KnownGateways(RelayFolder(folder).gateways, urls)
    async with _serving(folder, gateways, drain_s, patience_s) as relay:
        yield relay


@asynccontextmanager
async def _serving(folder: Path, gateways: KnownGateways, drain_s: float, patience_s: float) -> AsyncIterator[Relay]:
    place = RelayFolder(folder)
    _raise_file_limit()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(place.held())
        relay = Relay(place, gateways, patience_s)
        loop = asyncio.get_running_loop()
        shared = stack.enter_context(place.listening(place.shared, GATEWAY_SOCKET, 0o666))
        control = stack.enter_context(place.listening(place.root, CONTROL_SOCKET, 0o600))
        server = await loop.create_unix_server(relay.carrier.for_socket(), sock=shared, backlog=BACKLOG)
        async with ControlServer(control, relay.answer):
            await stack.enter_async_context(_beside(relay.doors.run()))
            log.info("relay_started", folder=str(place.root), incarnation=relay.incarnation)
            try:
                yield relay
            finally:
                server.close()
                log.info("relay_stopping", connections=len(relay.carrier.connections))
        relay.doors.close_all()
        await relay.carrier.drain(drain_s)


async def serve_relay(config: Config, stop: asyncio.Event, idle_s: float | None = None) -> None:
    """A relay process: serve until `stop` is set, or nobody had a use for it for `idle_s`.

    Raises ConfigError, SetupError.
    """
    async with relay_service(config.relay_dir(), config.nats.url, config.limits) as relay:
        while not stop.is_set():
            if idle_s is not None and relay.idle_s() > idle_s:
                log.info("relay_not_needed", idle_s=idle_s)
                return
            try:
                async with asyncio.timeout(IDLE_LOOK_S):
                    await stop.wait()
            except TimeoutError:
                continue


def _raise_file_limit() -> None:
    """Two descriptors a connection, and one a door."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _beside(work: Coroutine[Any, Any, None]) -> AbstractAsyncContextManager[None]:
    """Run it beside the block. When it breaks, the block ends with its error: it would be half a relay."""

    async def watch(ready: asyncio.Event) -> None:
        ready.set()
        await work

    return watching(watch)
