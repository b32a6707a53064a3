"""Model servers and gateways for tests of the pool: real HTTP servers, each gateway on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import test_utils, web

from rollyard.gateway.desk import PoolDesk
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, Probe
from rollyard.gateway.lease import GatewayLease
from rollyard.gateway.pool import PoolEntry, ServerPool
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.llm_servers import LlmServers
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer


class Weights:
    """A model server without a model: calls, and the control of its weights."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.version = "0"
        self.bears = ""
        """What it says that it serves; empty: the truth."""
        self.answers: dict[str, int] = {}
        """HTTP status by path, for one request each."""
        self.loads = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self._paused = False
        self._calls: dict[asyncio.Event, bool] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._ok)
        app.router.add_get("/version", self._version)
        app.router.add_post("/call", self._call)
        for path in ("pause", "abort", "resume", "load", "mark"):
            app.router.add_post(f"/{path}", self._control)
        return app

    def end_calls(self) -> None:
        for ended in self._calls:
            ended.set()

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.Response(text=self.bears or self.version)

    async def _call(self, _: web.Request) -> web.Response:
        if self._paused:
            self.said.append("called while paused")
        ended = asyncio.Event()
        self._calls[ended] = True
        began = self.version
        await ended.wait()
        del self._calls[ended]
        return web.json_response({"began": began, "ended": self.version})

    async def _control(self, request: web.Request) -> web.Response:
        path = request.path.strip("/")
        body = await request.json()
        self.said.append(" ".join([path, *body.values()]))
        if status := self.answers.pop(path, 0):
            return web.Response(status=status, text="no")
        match path:
            case "pause" | "abort":
                self._paused = True
                if path == "abort":
                    self.end_calls()
            case "resume":
                self._paused = False
            case _:
                self.loads.set()
                await self.may_load.wait()
                self.version = body["version"]
        return web.Response()


class PlainEngine:
    """Speaks to `Weights`: engine and control in one."""

    modes: ClassVar[frozenset[str]] = frozenset({"capture"})

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def probe(self, server: LlmServer) -> Probe:
        async with self._client.get(server.url + "/health") as response:
            response.raise_for_status()
        return Probe(trainable=True)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        yield EngineChunk()

    async def count(self, server: LlmServer, *_: Any) -> int | None:
        return None

    async def pause(self, server: LlmServer, *, abort: bool) -> None:
        await self._post(server, "abort" if abort else "pause")

    async def resume(self, server: LlmServer) -> None:
        await self._post(server, "resume")

    async def abort_all(self, server: LlmServer) -> None:
        await self._post(server, "abort")

    async def load(self, server: LlmServer, checkpoint: str, policy_version: int) -> None:
        await self._post(server, "load", checkpoint=checkpoint, version=str(policy_version))

    async def mark(self, server: LlmServer, policy_version: int) -> None:
        await self._post(server, "mark", version=str(policy_version))

    async def version(self, server: LlmServer) -> str | None:
        async with self._client.get(server.url + "/version") as response:
            return await response.text()

    async def _post(self, server: LlmServer, path: str, **body: str) -> None:
        async with self._client.post(f"{server.url}/{path}", json=body) as response:
            if response.status != 200:
                raise ModelError(
                    f"{path} answered {response.status}", status=response.status, retryable=response.status >= 500
                )


class Gateway:
    """What a gateway process has to do with the pool, and nothing else of it."""

    def __init__(self, bus: Bus, name: str, client: aiohttp.ClientSession) -> None:
        engine = PlainEngine(client)
        self.bus = bus
        self.pool = ServerPool(bus, {"vllm": engine})
        self.desk = PoolDesk(bus, name, self.pool, {"vllm": engine})
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.pool.run()), asyncio.create_task(self.desk.run())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    async def call(self, session: str = "session") -> dict[str, str]:
        """One call, as the gateway makes them: at whatever server takes it."""
        entry = await self.pool.choose("default", session, training=True)
        return await self.call_at(entry)

    async def call_at(self, entry: PoolEntry) -> dict[str, str]:
        with self.pool.busy(entry):
            async with self._client.post(entry.server.url + "/call") as response:
                answer: dict[str, str] = await response.json()
                return answer | {"server": entry.server.server_id}

    def entry(self, server_id: str) -> PoolEntry:
        [entry] = [entry for entry in self.pool.entries() if entry.server.server_id == server_id]
        return entry


class Fleet:
    """Servers and gateways of one test."""

    def __init__(self, nats_url: str, bus: Bus, client: aiohttp.ClientSession, stack: AsyncExitStack) -> None:
        self.bus = bus
        self.pool = LlmServers(bus)
        self.servers: dict[str, Weights] = {}
        self.gateways: list[Gateway] = []
        self.nats_url = nats_url
        self._client = client
        self._stack = stack

    async def server(self, server_id: str, *, register: bool = True) -> LlmServer:
        """Start a server; register it under version 0."""
        weights = self.servers[server_id] = Weights()
        served = await self._stack.enter_async_context(test_utils.TestServer(weights.app()))
        self._stack.callback(weights.end_calls)
        url = str(served.make_url("")).rstrip("/")
        entry = LlmServer(server_id=server_id, url=url, engine="vllm", policy_version=0)
        if register:
            await self.pool.add(entry)
        return entry

    async def gateway(self, *, silent: bool = False, lease_s: float = 30.0) -> Gateway:
        """Start a gateway that knows all servers; a silent one only holds a lease."""
        bus = await self._stack.enter_async_context(Bus.connect(self.nats_url, name="gateway"))
        name = f"gw-{len(self.gateways)}"
        gateway = Gateway(bus, name, self._client)
        if silent:
            await GatewayLease(bus, name, lease_s).renew("")
            return gateway
        self.gateways.append(gateway)
        gateway.start()
        self._stack.push_async_callback(gateway.stop)
        await gateway.desk.ready.wait()
        await until(lambda: sum(entry.healthy for entry in gateway.pool.entries()) == len(self.servers))
        await GatewayLease(bus, name, lease_s).renew("")
        return gateway

    async def states(self) -> dict[str, tuple[str, int | None]]:
        return {server.server_id: (server.state, server.policy_version) for server in await self.pool.all()}

    async def until(self, condition: Callable[[], Any]) -> None:
        await until(condition)

    async def until_state(self, server_id: str, state: str) -> None:
        async def reached() -> bool:
            return (await self.pool.get(server_id))[0].state == state

        await until_true(reached)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(0.005)


async def until_true(condition: Callable[[], Awaitable[Any]]) -> None:
    while not await condition():  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.01)


@pytest.fixture
async def fleet(bus: Bus, nats: EmbeddedNats) -> AsyncIterator[Fleet]:
    async with aiohttp.ClientSession() as client, AsyncExitStack() as stack:
        yield Fleet(nats.url, bus, client, stack)
