"""Servers that answer badly, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollyard.gateway.engines import engines
from rollyard.gateway.engines.engine import Engine, EngineChunk, EngineRequest
from rollyard.gateway.engines.upstream import http_client, too_long_numbers
from rollyard.gateway.scripted_llm import serve_app
from rollyard.schemas.errors import ModelError, PromptTooLong
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ask = Callable[[Handler], AbstractAsyncContextManager[Callable[[], Awaitable[list[EngineChunk]]]]]


@pytest.fixture(params=["vllm", "sglang", "llamacpp"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Ask a server that is one handler, with each engine in tokens mode."""

    @asynccontextmanager
    async def asking(handler: Handler) -> AsyncIterator[Callable[[], Awaitable[list[EngineChunk]]]]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with serve_app(app) as url, http_client() as client:
            engine: Engine = engines(client)[request.param]
            server = LlmServer(server_id="s", url=url, engine=request.param, mode="tokens")
            call = EngineRequest(call_id="c", server=server, params={"max_tokens": 5}, prompt_ids=TokenIds.of([1, 2]))

            async def all_chunks() -> list[EngineChunk]:
                return [chunk async for chunk in engine.generate(call)]

            yield all_chunks

    return asking


def answering(body: bytes, status: int = 200, content_type: str = "text/event-stream") -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type)

    return handler


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b'{"choices": [{"text": "whole"}]}'),
        ("text/html", b"<html>a proxy</html>"),
        ("text/plain", b"hello \xff"),
        ("text/event-stream", b'{"choices": []}\n'),
    ],
)
async def test_an_answer_that_is_no_stream(ask: Ask, content_type: str, body: bytes) -> None:
    async with ask(answering(body, content_type=content_type)) as all_chunks:
        with pytest.raises(ModelError, match="something else than a stream of events") as failed:
            await all_chunks()
    assert body[:8].decode(errors="replace") in str(failed.value)
    assert "proxy" in failed.value.hint


@pytest.mark.parametrize("body", [b"", b"data: {}\n\n", b"data: {}\n\ndata: {", b": ping\n\n", b"data: [DONE]\n\n"])
async def test_a_stream_that_ends_too_early(ask: Ask, body: bytes) -> None:
    async with ask(answering(body)) as all_chunks:
        with pytest.raises(ModelError, match="broke off its reply") as failed:
            await all_chunks()
    assert failed.value.retryable


async def test_a_connection_that_breaks(ask: Ask) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    async with ask(handler) as all_chunks:
        with pytest.raises(ModelError, match="failed") as failed:
            await all_chunks()
    assert (failed.value.retryable, failed.value.status) == (True, 0)


async def test_bytes_that_are_not_utf8(ask: Ask) -> None:
    async with ask(
        answering(b'data: {"choices": [{"text": "\xff"}], "text": "\xff", "content": "\xff"}\n\n')
    ) as all_chunks:
        with pytest.raises(ModelError, match="cannot be read"):
            await all_chunks()


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (
            400,
            b'{"error": {"message": "This model\'s maximum context length is 5", "code": 400}}',
            PromptTooLong,
            False,
        ),
        (400, b'{"error": {"message": "n", "type": "exceed_context_size_error"}}', PromptTooLong, False),
        (
            400,
            b'{"object": "error", "message": "longer than the model\'s context length (5 tokens)."}',
            PromptTooLong,
            0,
        ),
        (400, b"\xff", ModelError, False),
        (404, b'{"error": "no such model"}', ModelError, False),
        (429, b"slow down", ModelError, True),
        (503, b'{"detail": []}', ModelError, True),
    ],
)
async def test_refusals(ask: Ask, status: int, body: bytes, kind: type[ModelError], retryable: bool) -> None:
    async with ask(answering(body, status, "application/json")) as all_chunks:
        with pytest.raises(ModelError, match=f"answered {status}") as failed:
            await all_chunks()
    assert type(failed.value) is kind
    assert (failed.value.status, failed.value.retryable) == (status, bool(retryable))


@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp"])
async def test_a_server_that_is_not_there(name: str) -> None:
    async with serve_app(web.Application()) as url:
        pass
    server = LlmServer(server_id="s", url=url, engine=name, mode="tokens")  # type: ignore[arg-type]
    async with http_client() as client:
        engine = engines(client)[name]
        request = EngineRequest(call_id="c", server=server, params={"max_tokens": 1}, prompt_ids=TokenIds.of([1]))
        for attempt in (anext(engine.generate(request)), engine.probe(server)):
            with pytest.raises(ModelError, match="is the model server up") as failed:
                await attempt
            assert (failed.value.retryable, failed.value.status) == (True, 0)


async def test_a_reply_of_one_long_line() -> None:
    text = "x" * (2 << 20)
    body = b'data: {"choices": [{"delta": {"content": "%s"}, "finish_reason": "stop"}]}\n\n' % text.encode()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answering(body))
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="openai")
        [chunk] = [c async for c in engines(client)["openai"].generate(EngineRequest(call_id="c", server=server))]
    assert chunk.text == text


async def test_a_closed_generator_closes_the_connection(ask: Ask) -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if "abort" in request.path:
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.005)
        except ConnectionError:
            gone.set()
        return response

    async with ask(handler) as all_chunks:
        task = asyncio.ensure_future(all_chunks())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await gone.wait()


async def test_headers_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers)
        return web.Response(status=503)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="openai", api_key_env="A_KEY")
        engine = engines(client)["openai"]
        with pytest.raises(ModelError, match="key of model server s is not set"):
            await anext(engine.generate(EngineRequest(call_id="c", server=server)))
        monkeypatch.setenv("A_KEY", "secret")
        with pytest.raises(ModelError, match="503"):
            await anext(engine.generate(EngineRequest(call_id="c", server=server)))
    assert [(h["x-request-id"], h["Authorization"]) for h in seen] == [("c", "Bearer secret")]


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        (
            "This model's maximum context length is 150 tokens. However, your request has 312 input tokens. Please ...",
            (150, 312),
        ),
        (
            "This model's maximum context length is 150 tokens. However, you requested 400 tokens "
            "(312 in the messages, 88 in the completion). Please ...",
            (150, 312),
        ),
        ("The input (312 tokens) is longer than the model's context length (150 tokens).", (150, 312)),
        ("request (312 tokens) exceeds the available context size (150 tokens), try increasing it", (150, 312)),
        ("maximum context length reached", (0, 0)),
    ],
)
def test_the_numbers_of_a_prompt_that_is_too_long(said: str, numbers: tuple[int, int]) -> None:
    assert too_long_numbers(said) == numbers
