"""Weight updates at servers that speak vLLM's and SGLang's control endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rollyard.gateway.engines.control import controls
from rollyard.gateway.engines.upstream import http_client
from rollyard.gateway.scripted_llm import serve_app
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer

USER: dict[str, Any] = {"role": "user", "content": "hello"}
ENGINES = pytest.mark.parametrize("engine", ["vllm", "sglang"])


@ENGINES
async def test_versions(rig: Any, engine: str) -> None:
    async with rig(engine, {"content": "a"}) as r:
        assert await r.control.version(r.server) is None
        await r.control.mark(r.server, 3)
        assert await r.control.version(r.server) == "3"
        await r.control.load(r.server, "/checkpoints/4", 4)
        assert await r.control.version(r.server) == "4"


@ENGINES
async def test_new_calls_wait_while_a_server_is_paused(rig: Any, engine: str) -> None:
    async with rig(engine, {"content": "hello"}, mode="capture") as r:
        await r.control.pause(r.server, abort=True)
        call = asyncio.ensure_future(r.all(messages=[USER]))
        await asyncio.sleep(0.05)
        assert r.journal == []
        await r.control.resume(r.server)
        assert "".join(chunk.text for chunk in await call) == "hello"


async def test_vllm_finishes_what_runs_before_it_is_paused(rig: Any) -> None:
    async with rig("vllm", {"content": "hello world", "chunk_delay_s": 0.01}, mode="capture") as r:
        async for _ in r.engine.generate(r.request(messages=[USER])):
            await r.control.pause(r.server, abort=False)
            assert [entry.status for entry in r.journal] == ["ok"]
            async with r.client.get(f"{r.server.url}/is_paused") as response:
                assert await response.json() == {"is_paused": True}


@ENGINES
async def test_all_calls_are_aborted_and_the_server_goes_on(rig: Any, engine: str) -> None:
    async with rig(engine, {"content": "hello " * 20, "chunk_delay_s": 0.05}, mode="capture") as r:
        with pytest.raises(ModelError, match="aborted the call"):
            async for _ in r.engine.generate(r.request(messages=[USER])):
                await r.control.abort_all(r.server)
        assert [entry.status for entry in r.journal] == ["aborted"]
        chunk = await anext(r.engine.generate(r.request(messages=[USER])))
        assert chunk.finish_reason is None


async def test_vllm_without_its_dev_mode_says_how_to_get_it() -> None:
    async with serve_app(web.Application()) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="vllm")
        with pytest.raises(ModelError, match="404") as failed:
            await controls(client)["vllm"].pause(server, abort=True)
        assert (failed.value.status, failed.value.retryable) == (404, False)
        assert await controls(client)["vllm"].version(server) is None
    assert "VLLM_SERVER_DEV_MODE=1" in failed.value.hint


async def test_a_vllm_that_keeps_what_it_cached_does_not_bear_the_new_version() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"success": False} if request.path == "/reset_prefix_cache" else {"results": [None]})

    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="vllm")
        with pytest.raises(ModelError, match="did not drop what it had cached") as failed:
            await controls(client)["vllm"].load(server, "/checkpoints/4", 4)
    assert failed.value.retryable
    assert asked == ["/collective_rpc", "/reset_prefix_cache"]


async def test_a_load_that_failed() -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no such folder"})

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", handler)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="sglang")
        with pytest.raises(ModelError, match="no such folder") as failed:
            await controls(client)["sglang"].load(server, "/nowhere", 1)
    assert not failed.value.retryable


@pytest.mark.parametrize("engine", ["llamacpp", "openai"])
async def test_other_servers_keep_their_weights(engine: str) -> None:
    async with http_client() as client:
        control = controls(client)[engine]
        server = LlmServer(server_id="s", url="http://127.0.0.1:9", engine=engine)  # type: ignore[arg-type]
        for attempt in (
            control.pause(server, abort=False),
            control.resume(server),
            control.abort_all(server),
            control.load(server, "/x", 1),
        ):
            with pytest.raises(ModelError, match="cannot be updated while it runs") as failed:
                await attempt
            assert failed.value.hint
        await control.mark(server, 1)
        assert await control.version(server) is None
