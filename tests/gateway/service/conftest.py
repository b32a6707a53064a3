"""Whole gateways on a real bus, in front of a scripted model server that speaks vLLM's protocol over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.gateway.scripted.journal import Entry, open_journal, read_journal
from rollyard.gateway.scripted.script import Script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.service import RunningGateway, gateway_service
from rollyard.gateway.settings import GatewaySettings
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.fleet import LlmServer

SECRET = b"a secret of the tests"


class Stage:
    """What a test has at hand: gateways, model servers, keys, the log."""

    def __init__(self, bus: Bus, client: aiohttp.ClientSession, tokenizer: TextTokenizer, folder: Path) -> None:
        self.bus = bus
        self.client = client
        self._tokenizer = tokenizer
        self._folder = folder
        self._stack = AsyncExitStack()
        self._journals: list[Path] = []
        self._registered = 0

    async def model(
        self, *turns: dict[str, Any], name: str = "s1", engine: str = "vllm", tokenizer: str = "", **script: Any
    ) -> None:
        """Start a scripted server and register it, with a tokenizer in tokens mode.

        It goes through `turns`, one for each reply in a request.
        """
        path = self._folder / f"journal-{name}.jsonl"
        self._journals.append(path)
        journal = self._stack.enter_context(open_journal(path))
        probed = {"match": "Hi", "turns": [{"content": "hello"}]}
        plan = {"conversations": [probed, {"turns": list(turns)}], "chat_template": "chatml_tools", **script}
        app = build_app(msgspec.convert(plan, Script), self._tokenizer, journal)
        url = await self._stack.enter_async_context(serve_app(app))
        await self.register(
            LlmServer(
                server_id=name,
                url=url,
                engine=engine,  # type: ignore[arg-type]
                upstream_model="scripted",
                policy_version=7,
                mode="tokens" if tokenizer else "capture",
                tokenizer=tokenizer,
                parser="hermes" if tokenizer else "",
            )
        )

    async def register(self, server: LlmServer) -> None:
        self._registered += 1
        await Bucket(self.bus, subjects.LLM_SERVERS, LlmServer).put(server.server_id, server)

    def journal(self) -> list[Entry]:
        """What the model servers were asked, apart from probes."""
        entries = [entry for path in self._journals for entry in read_journal(path)]
        return [entry for entry in entries if entry.request_id != "probe"]

    async def gateway(self, *, ready: bool = True, **settings: Any) -> RunningGateway:
        """Start a gateway; `ready` waits until probes have found every server healthy."""
        running = gateway_service(self.bus, GatewaySettings(secret=SECRET, **settings))
        gateway = await self._stack.enter_async_context(running)

        async def healthy() -> bool:
            return sum(entry.healthy for entry in gateway.gateway.pool.entries()) == self._registered

        if ready:
            await self.until(healthy)
        return gateway

    def key(self, rollout: str = "r1", **grant: Any) -> str:
        return sign(self.grant(rollout, **grant), SECRET)

    def grant(self, rollout: str = "r1", **grant: Any) -> SessionGrant:
        return SessionGrant(**{"run": "run", "rollout_id": rollout, "attempt": 1, **grant})

    async def close_session(self, rollout: str = "r1", attempt: int = 1) -> None:
        await Bucket(self.bus, subjects.SESSIONS, Any).put(subjects.session_key("run", rollout, attempt), {})

    async def ask(
        self, gateway: RunningGateway, messages: list[dict[str, Any]], *, key: str | None = None, **body: Any
    ) -> tuple[int, dict[str, Any]]:
        """(status, body) of a chat completion that is not streamed."""
        async with self.post(gateway, messages, key=key, **body) as response:
            return response.status, await response.json()

    def post(
        self, gateway: RunningGateway, messages: list[dict[str, Any]], *, key: str | None = None, **body: Any
    ) -> Any:
        return self.client.post(
            f"{gateway.url}/v1/chat/completions",
            json={"model": "gpt-x", "messages": messages, **body},
            headers={"Authorization": f"Bearer {key or self.key()}"},
        )

    async def events(self, rollout: str = "r1") -> list[tuple[int, CallIntent | CallEnd]]:
        """The calls of a rollout in the log, with their sequences."""
        subject = subjects.log_subject("run", rollout, "call")
        return [(s.seq, decode(s.data, CallEvent)) async for s in self.bus.read(subjects.LOG, subject)]

    async def ends(self, rollout: str = "r1") -> list[CallEnd]:
        return [event for _, event in await self.events(rollout) if isinstance(event, CallEnd)]

    async def intents(self, rollout: str = "r1") -> list[CallIntent]:
        return [event for _, event in await self.events(rollout) if isinstance(event, CallIntent)]

    async def until(self, condition: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `condition` gives as soon as it is true; the test's own timeout ends the wait."""
        while not (found := await condition()):  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.01)
        return found

    async def aclose(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def stage(bus: Bus, tokenizer: TextTokenizer, tmp_path: Path) -> AsyncIterator[Stage]:
    async with aiohttp.ClientSession() as client:
        stage = Stage(bus, client, tokenizer, tmp_path)
        try:
            yield stage
        finally:
            await stage.aclose()
