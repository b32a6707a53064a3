"""A vLLM in capture mode that does what the scripted server does not: what the user's last word asks for."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

MALFORMED = '{"command": "ls'


class OddServer:
    """Words: `malformed` arguments, a `filtered` reply, a stream in single `bytes`. Else it says `seen`."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "odd", "max_model_len": 1000}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        asked = str(messages[-1]["content"]) if messages[-1]["role"] == "user" else ""
        # The prompt of a turn goes on from the turn before.
        prompt = [1, 2, 3] + [5, 6, 9] * turn
        delta: dict[str, Any] = {"content": "seen \u00e4\U0001f600"}
        finish = "stop"
        if "malformed" in asked:
            function = {"name": "bash", "arguments": MALFORMED}
            delta, finish = {"tool_calls": [{"index": 0, "id": "x", "function": function}]}, "tool_calls"
        elif "filtered" in asked:
            finish = "content_filter"
        pieces = [{"content": piece} for piece in delta["content"]] if "content" in delta else [delta]
        first, last = pieces[0], pieces[1:] or [{}]
        events = [self._chunk(first, 5, prompt_token_ids=prompt)]
        events += [self._chunk(piece) for piece in last[:-1]]
        events += [self._chunk(last[-1], 6, finish)]
        return await self._stream(request, events, len(prompt), "bytes" in asked)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.5, -0.25]}
        choice = {"index": 0, "text": "seen \u00e4\U0001f600", "logprobs": logprobs, "prompt_token_ids": [1, 2, 3]}
        events = [{"choices": [{**choice, "finish_reason": "content_filter" if "filtered" in prompt else "stop"}]}]
        return await self._stream(request, events, 3, "bytes" in prompt)

    def _chunk(self, delta: Any, token: int | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
        logprobs = {"content": [{"token": "x", "logprob": -0.5}] if token else []}
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {"choices": [{**choice, "token_ids": [token] if token else []}], **more}

    async def _stream(
        self, request: web.Request, events: list[dict[str, Any]], prompt: int, in_bytes: bool
    ) -> web.StreamResponse:
        usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 2}}
        data = b"".join(b"data: " + msgspec.json.encode(event) + b"\r\n\r\n" for event in [*events, usage])
        response = web.StreamResponse()
        await response.prepare(request)
        # In chunks of HTTP of one byte each, whose borders fall within characters and between CR and LF.
        for piece in [data[at : at + 1] for at in range(len(data))] if in_bytes else [data]:
            await response.write(piece)
        await response.write_eof(b"data: [DONE]\n\n")
        return response
