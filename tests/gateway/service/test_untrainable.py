"""Servers whose ids cannot be believed: the reply goes out, and the record says why it is not trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rollyard.gateway.scripted_llm import serve_app
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}
Serve = Callable[[list[dict[str, Any]]], Any]


def chunk(
    text: str, ids: list[int], logprobs: list[float | None], finish: str | None = None, **more: Any
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "delta": {"content": text},
        "token_ids": ids,
        "logprobs": {"content": [{"token": "x", "logprob": value} for value in logprobs]},
        "finish_reason": finish,
    }
    return {"choices": [choice], **more}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


GOOD = [
    chunk("hel", [5], [-0.5], prompt_token_ids=[1, 2, 3]),
    chunk("lo", [6], [-0.25], "stop"),
    usage(3, 2),
]


class OddServer:
    """Answers every request but the probe with the same events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = GOOD

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "odd"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        probe = request.headers["x-request-id"] == "probe"
        for event in GOOD if probe else self.events:
            await response.write(b"data: " + msgspec.json.encode(event) + b"\r\n\r\n")
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
async def odd(stage: Any) -> AsyncIterator[OddServer]:
    server = OddServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    async with serve_app(app) as url:
        await stage.register(LlmServer(server_id="odd", url=url, engine="vllm", upstream_model="odd"))
        yield server


async def test_a_good_reply(stage: Any, odd: OddServer) -> None:
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [USER])
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")
    [end] = await stage.ends()
    assert end.untrainable is None
    assert end.prompt_ids == TokenIds.of([1, 2, 3])
    assert end.completion_ids == TokenIds.of([5, 6])
    assert end.logprobs == Logprobs.of([-0.5, -0.25])


@pytest.mark.parametrize(
    ("events", "reason", "ids"),
    [
        ([GOOD[0], GOOD[1], usage(3, 3)], "2 sampled ids but a usage of 3", []),
        ([GOOD[0], GOOD[1], usage(4, 2)], "3 prompt ids but a usage of 4", []),
        ([GOOD[0], chunk("lo", [6], [], "stop"), usage(3, 2)], "2 sampled ids but 1 logprobs", [5, 6]),
        ([GOOD[0], chunk("lo", [6], [None], "stop"), usage(3, 2)], "a logprob is not a finite number", [5, 6]),
        ([GOOD[0], chunk("lo", [-6], [-1], "stop"), usage(3, 2)], "ids that are none", []),
        ([chunk("hello", [5], [-1], "stop"), usage(3, 1)], "the server returned no token ids", []),
    ],
)
async def test_ids_that_cannot_be_believed(
    stage: Any, odd: OddServer, events: list[dict[str, Any]], reason: str, ids: list[int]
) -> None:
    gateway = await stage.gateway()
    odd.events = events
    status, body = await stage.ask(gateway, [USER])
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")
    [end] = await stage.ends()
    assert end.status == "ok"
    assert reason in end.untrainable
    assert end.completion_ids == TokenIds.of(ids)
    assert end.logprobs == Logprobs()


async def test_a_stream_that_ends_without_a_finish_reason_is_broken(stage: Any, odd: OddServer) -> None:
    gateway = await stage.gateway()
    odd.events = GOOD[:1]
    status, body = await stage.ask(gateway, [USER])
    assert status == 503
    assert "broke off" in body["error"]["message"]
    [end] = await stage.until(stage.ends)
    assert end.status == "error"


async def test_a_reply_that_the_server_aborted_is_no_reply(stage: Any, odd: OddServer) -> None:
    gateway = await stage.gateway()
    odd.events = [GOOD[0], chunk("lo", [6], [-1.0], "abort")]
    status, body = await stage.ask(gateway, [USER])
    assert status == 503
    assert "aborted the call" in body["error"]["message"]


async def test_an_error_that_comes_as_an_event(stage: Any, odd: OddServer) -> None:
    gateway = await stage.gateway()
    odd.events = [{"error": {"message": "out of memory", "code": 500}}]
    status, body = await stage.ask(gateway, [USER])
    assert status == 502
    assert "out of memory" in body["error"]["message"]


async def test_prompt_ids_of_a_megabyte(stage: Any, odd: OddServer) -> None:
    gateway = await stage.gateway()
    prompt = list(range(200_000))
    odd.events = [chunk("hello", [5], [-1.0], "stop", prompt_token_ids=prompt), usage(200_000, 1)]
    assert (await stage.ask(gateway, [USER]))[0] == 200
    [end] = await stage.ends()
    assert end.prompt_ids == TokenIds.of(prompt)
