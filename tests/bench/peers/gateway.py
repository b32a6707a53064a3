"""Rollyard's gateway as a peer: the real process, with keys that the benchmark signs."""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from peers.peer import CHAT, Door, World
from peers.process import started

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import Config, LogConfig, NatsConfig, StoreConfig, to_toml
from rollyard.pipeline.embedded import free_port
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import ClosedSession, LlmServer

SECRET: Final = b"benchmark secret, 32 bytes long!"
RUN: Final = "bench"


@dataclass
class GatewayPeer:
    """See Peer. Each client is a session of its own. `ports` are those of one or several processes."""

    name: str
    ports: list[int]
    pids: list[int]
    bus: Bus
    continues: bool = False
    captures: bool = True
    streams: bool = True
    plain: bool = True
    slow: bool = False
    _open: list[SessionGrant] = field(default_factory=list)

    def later_turns(self) -> GatewayPeer:
        """The same processes, asked to continue conversations that they know."""
        return replace(self, name=f"{self.name}, later turn", continues=True, _open=[])

    async def door(self, client: int, model: str) -> Door:
        """See Peer."""
        grant = SessionGrant(
            run=RUN, rollout_id=uuid4().hex[:16], attempt=1, model=model, training=model in ("exact", "tokens")
        )
        self._open.append(grant)
        port = self.ports[client % len(self.ports)]
        return Door(port, CHAT, {"Authorization": f"Bearer {sign(grant, SECRET)}"})

    async def leave(self) -> None:
        """See Peer. Closes the sessions, as the end of an attempt does."""
        bucket: Bucket[ClosedSession] = Bucket(self.bus, subjects.SESSIONS, ClosedSession)
        grants, self._open = self._open, []
        async with asyncio.TaskGroup() as group:
            for grant in grants:
                group.create_task(bucket.put(grant.session(), ClosedSession()))


async def register(bus: Bus, world: World) -> None:
    """Tell the gateways of the stub, once for each of its models."""
    bucket: Bucket[LlmServer] = Bucket(bus, subjects.LLM_SERVERS, LlmServer)
    for model, engine in (("exact", "vllm"), ("plain", "openai"), ("paced", "vllm")):
        server = LlmServer(server_id=model, url=world.stub_url, engine=engine, model=model)  # type: ignore[arg-type]
        await bucket.put(model, server)


async def register_tokens(bus: Bus, world: World, tokenizer: Path) -> None:
    """Once more for tokens mode: its tokenizer takes memory in every gateway."""
    bucket: Bucket[LlmServer] = Bucket(bus, subjects.LLM_SERVERS, LlmServer)
    server = LlmServer(
        server_id="tokens",
        url=world.stub_url,
        engine="vllm",
        model="tokens",
        upstream_model="exact",
        mode="tokens",
        tokenizer=str(tokenizer),
        max_context=262_144,
    )
    await bucket.put("tokens", server)


@asynccontextmanager
async def gateways(world: World, bus: Bus, count: int = 1, name: str = "rollyard") -> AsyncIterator[GatewayPeer]:
    """`count` gateway processes, ready to serve."""
    folder = world.folder / uuid4().hex
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    config = Config(
        nats=NatsConfig(url=world.nats_url), store=StoreConfig(data=str(folder)), log=LogConfig(level="warning")
    )
    (folder / "config.toml").write_text(to_toml(config))
    ports, pids = [], []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            port = free_port()
            command = [sys.executable, "-m", "rollyard", "gateway", "--port", str(port)]
            command += ["--config", str(folder / "config.toml")]
            pids.append(await stack.enter_async_context(started(command, folder / f"{port}.log", port)))
            ports.append(port)
        for port in ports:
            await _ready(port)
        yield GatewayPeer(name, ports, pids, bus)


async def _ready(port: int) -> None:
    """Wait until every server that is registered was found healthy."""
    for _ in range(300):
        text = await asyncio.to_thread(_readyz, port)
        words = text.split()
        if len(words) > 3 and words[1] == words[3] != "0":
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway at port {port} does not find the stub healthy: {text}")


def _readyz(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            return str(answer.read().decode())
    except urllib.error.URLError as error:
        return str(error)
