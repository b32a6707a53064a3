"""A whole gateway for a module of tests: a bus, scripted model servers behind a recorder, and agents that talk to it.

Each talk has a session of its own, so that all of them share the one gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import aiohttp
import msgspec
from aiohttp import web
from speakers import SPEAKERS, Json, Said, Speaker, Sse, ToolCall

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.gateway.scripted.journal import Entry, open_journal
from rollyard.gateway.scripted.script import Script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.service import RunningGateway, gateway_service
from rollyard.gateway.settings import GatewaySettings
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import nats_server
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.log import read_rollout
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.call import CallRecord
from rollyard.schemas.fleet import LlmServer
from rollyard.stages.calls import resolve

SECRET = b"a secret of the tests"
RUN = "run"


class Rig:
    """One bus with gateways and model servers. Every server is a served model of its own name.

    `asked` holds the bodies that model servers got, by call id.
    """

    def __init__(
        self, bus: Bus, client: aiohttp.ClientSession, folder: Path, tokenizer: TextTokenizer, stack: AsyncExitStack
    ) -> None:
        self.bus = bus
        self.client = client
        self.tokenizer = tokenizer
        self.asked: dict[str, list[Json]] = {}
        self._folder = folder
        self._stack = stack
        self._journals: dict[str, tuple[BinaryIO, dict[str, list[Entry]]]] = {}
        self._servers: list[str] = []

    async def scripted(
        self,
        name: str,
        conversations: list[Json],
        *,
        tokenizer: Path | None = None,
        flavour: str = "vllm",
        engine: str = "",
        **script: Any,
    ) -> None:
        """Serve a script as the model `name`: in tokens mode where a tokenizer is given, else in capture mode."""
        path = self._folder / f"{name}.jsonl"
        # The last one is for probes.
        plan = {"conversations": [*conversations, {"turns": [{"content": "hello"}]}], **script}
        plan |= {"chat_template": "chatml_tools", "flavour": flavour}
        journal = self._stack.enter_context(open_journal(path))
        self._journals[name] = self._stack.enter_context(path.open("rb")), {}
        app = build_app(msgspec.convert(plan, Script), self.tokenizer, journal)
        await self.serve(app, name, engine=engine or flavour, tokenizer=str(tokenizer or ""), upstream_model="scripted")

    async def serve(self, app: web.Application, name: str, *, engine: str, tokenizer: str = "", **entry: Any) -> str:
        """Serve an application as the model `name`, and record what it is asked."""
        app.middlewares.append(self._record)
        url = await self._stack.enter_async_context(serve_app(app))
        await self.register(name, url=url, engine=engine, tokenizer=tokenizer, **entry)
        return url

    async def register(self, name: str, *, tokenizer: str = "", **entry: Any) -> None:
        entry = {"server_id": name, "model": name, "tokenizer": tokenizer, "policy_version": 7, **entry}
        entry["mode"] = "tokens" if tokenizer else "capture"
        await Bucket(self.bus, subjects.LLM_SERVERS, LlmServer).put(name, msgspec.convert(entry, LlmServer))
        self._servers.append(name)

    @web.middleware
    async def _record(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method == "POST":
            call_id = request.headers.get("x-request-id", "")
            self.asked.setdefault(call_id, []).append(msgspec.json.decode(await request.read()))
        return await handler(request)

    async def gateway(self, **settings: Any) -> RunningGateway:
        """A gateway that has found every server healthy."""
        running = gateway_service(self.bus, GatewaySettings(secret=SECRET, **settings))
        gateway = await self._stack.enter_async_context(running)

        async def healthy() -> bool:
            return {entry.server.server_id for entry in gateway.gateway.pool.entries() if entry.healthy} >= {
                *self._servers
            }

        await until(healthy)
        return gateway

    def talk(self, gateway: RunningGateway, protocol: str, model: str, opening: str = "", **grant: Any) -> Talk:
        """An agent with a session of its own, whose first words begin with `opening`."""
        return Talk(self, gateway, SPEAKERS[protocol], model, opening, grant, rollout=f"r{uuid4().hex[:12]}")

    def journal(self, name: str) -> dict[str, list[Entry]]:
        """What the model `name` sampled, by call id. Lines are read once."""
        journal, entries = self._journals[name]
        for line in journal:
            entry = msgspec.json.decode(line, type=Entry)
            entries.setdefault(entry.request_id, []).append(entry)
        return entries


@dataclass
class Talk:
    """One agent in one session. `history` is in the agent's own protocol."""

    rig: Rig
    gateway: RunningGateway
    speaker: Speaker
    model: str
    opening: str
    grant: dict[str, Any]
    rollout: str
    history: list[Json] = field(default_factory=list)
    system: str = ""
    tools: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def protocol(self) -> str:
        return self.speaker.name

    @property
    def key(self) -> str:
        grant = SessionGrant(
            **{"run": RUN, "rollout_id": self.rollout, "attempt": 1, "model": self.model, **self.grant}
        )
        return sign(grant, SECRET)

    def user(self, text: str) -> None:
        """Say something; the first words tell the script which conversation this is."""
        self.history.append(self.speaker.user(text if self.history else f"{self.opening} {text}"))

    def answer(self, calls: Sequence[ToolCall], *texts: str) -> None:
        """Give the results of calls."""
        self.history += self.speaker.results(tuple(calls), list(texts))

    def body(self, *, stream: bool = False, **fields: Any) -> Json:
        return self.speaker.body(self.history, self.tools, self.system, stream) | fields

    def post(self, body: Json | bytes, *, path: str = "", key: str | None = None) -> Any:
        """A request; use as a context manager."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {self.key if key is None else key}", **self.headers}
        return self.rig.client.post(self.gateway.url + (path or self.speaker.path), data=data, headers=headers)

    async def ask(self, *, stream: bool = False, **fields: Any) -> Said:
        """A reply to the history, which it becomes a part of."""
        said = await self.repeat(stream=stream, **fields)
        self.history += said.echo
        return said

    async def repeat(self, *, stream: bool = False, **fields: Any) -> Said:
        """A reply to the history, which stays as it is."""
        async with self.post(self.body(stream=stream, **fields)) as response:
            data = await response.read()
            assert response.status == 200, data
        if not stream:
            return self.speaker.read(msgspec.json.decode(data))
        return self.speaker.read_stream(events_of(data))

    async def refused(self, status: int, body: Json | bytes | None = None, **how: Any) -> tuple[str, str, str]:
        """Type, code and message of the refusal that a request gets, in the protocol's own shape."""
        async with self.post(self.body() if body is None else body, **how) as response:
            data = await response.read()
            assert response.status == status, data
        return self.speaker.error(msgspec.json.decode(data))

    async def records(self) -> list[CallRecord]:
        """The calls of the session, as they stand in the log."""
        return resolve(await read_rollout(self.rig.bus, RUN, self.rollout, kinds=("call",)))

    async def ended(self, count: int = 1) -> list[CallRecord]:
        """The same, once so many have their ends."""

        async def there() -> list[CallRecord] | None:
            records = await self.records()
            return records if sum(record.end is not None for record in records) >= count else None

        found: list[CallRecord] = await until(there)
        return found

    async def asked(self, at: int = -1) -> Json:
        """What the model server was asked in one of the calls."""
        return self.rig.asked[(await self.records())[at].intent.call_id][-1]


def events_of(data: bytes) -> list[tuple[str, str]]:
    """Name and data of each event of a whole stream."""
    sse = Sse()
    sse.feed(data)
    return sse.events


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What `condition` gives as soon as it is true; the test's own timeout ends the wait."""
    while not (found := await condition()):  # noqa: ASYNC110 - what is waited for happens elsewhere
        await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def open_rig(folder: Path, tokenizer: TextTokenizer) -> AsyncIterator[Rig]:
    """A rig on a nats-server of its own."""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server(folder / "nats"))
        connecting = Bus.connect(nats.url, name="test", blobs=BlobStore(folder / "blobs"))
        bus = await stack.enter_async_context(connecting)
        await ensure(bus)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Rig(bus, client, folder, tokenizer, stack)
