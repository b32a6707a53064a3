"""Engines in front of a scripted server, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollyard.gateway.engines import engines
from rollyard.gateway.engines.control import ServerControl, controls
from rollyard.gateway.engines.engine import Engine, EngineChunk, EngineRequest
from rollyard.gateway.engines.upstream import http_client
from rollyard.gateway.scripted.journal import Entry, open_journal, read_journal
from rollyard.gateway.scripted.script import Script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}


class Rig:
    """One scripted server, and the engine and control that speak to it."""

    def __init__(self, client: aiohttp.ClientSession, server: LlmServer, journal: Path) -> None:
        self.client = client
        self.server = server
        self.engine: Engine = engines(client)[server.engine]
        self.control: ServerControl = controls(client)[server.engine]
        self._journal = journal

    @property
    def journal(self) -> list[Entry]:
        return [entry for entry in read_journal(self._journal) if entry.request_id != "probe"]

    def request(self, **fields: Any) -> EngineRequest:
        return EngineRequest(**{"call_id": "call", "server": self.server, "params": {"max_tokens": 500}, **fields})

    async def all(self, **fields: Any) -> list[EngineChunk]:
        return [chunk async for chunk in self.engine.generate(self.request(**fields))]


class Reply:
    """Chunks put together."""

    def __init__(self, chunks: list[EngineChunk]) -> None:
        self.text = "".join(chunk.text for chunk in chunks)
        self.reasoning = "".join(chunk.reasoning for chunk in chunks)
        self.ids = [number for chunk in chunks for number in chunk.token_ids or TokenIds()]
        self.logprobs = [value for chunk in chunks for value in chunk.logprobs or Logprobs()]
        self.prompt = [number for chunk in chunks for number in chunk.prompt_ids or TokenIds()]
        self.finish_reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
        self.stop_string = next((chunk.stop_string for chunk in chunks if chunk.stop_string), None)
        self.usages = [chunk.usage for chunk in chunks if chunk.usage]
        self.faults = [chunk.fault for chunk in chunks if chunk.fault]
        self.versions = [chunk.policy_version for chunk in chunks]


Rigs = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(scope="session")
def joined() -> type[Reply]:
    """Chunks put together."""
    return Reply


@pytest.fixture
def rig(tokenizer: TextTokenizer, tmp_path: Path) -> Rigs:
    """rig("vllm" or "sglang", *turns, mode=..., **script)"""

    @asynccontextmanager
    async def serving(engine: str, *turns: dict[str, Any], mode: str = "tokens", **script: Any) -> AsyncIterator[Rig]:
        plan = {"conversations": [{"turns": turns}], "chat_template": "chatml_tools", "flavour": engine, **script}
        with open_journal(tmp_path / "journal") as journal:
            app = build_app(msgspec.convert(plan, Script), tokenizer, journal)
            async with serve_app(app) as url, http_client() as client:
                fields = {"engine": engine, "mode": mode, "upstream_model": "scripted"}
                server = msgspec.convert({"server_id": "s1", "url": url, **fields}, LlmServer)
                yield Rig(client, server, tmp_path / "journal")

    return serving
