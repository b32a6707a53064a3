"""The HTTP side of the scripted policy: the endpoints of a vLLM server that the gateway uses."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter

import msgspec
from aiohttp import web

from rollyard.gateway.scripted import wire
from rollyard.gateway.scripted.journal import Journal
from rollyard.gateway.scripted.policy import ChatRequest, Reply, ScriptedPolicy
from rollyard.schemas.errors import ModelError

_MAX_BODY_BYTES = 64 << 20
_JSON = "application/json"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Text or messages to turn into ids."""

    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None


class ScriptedServer:
    """Serves one policy. It remembers one thing: how often each request came, so that failures come to an end."""

    def __init__(self, policy: ScriptedPolicy, journal: Journal) -> None:
        self._policy = policy
        self._journal = journal
        self._seen: Counter[bytes] = Counter()

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+scripted"})

    async def _models(self, request: web.Request) -> web.Response:
        length = self._policy.script.max_model_len
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": name, "max_model_len": length}
            for name in self._policy.script.models
        ]
        return web.json_response({"object": "list", "data": models})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=TokenizeRequest)
            if body.messages is not None:
                ids = self._policy.renderer.prompt(body.messages, body.tools)
            else:
                ids = self._policy.tokenizer.encode_rendered(body.prompt or "", "")
        except (msgspec.DecodeError, ModelError) as error:
            return _refusal(400, str(error))
        answer = {"tokens": ids.tolist(), "count": len(ids), "max_model_len": self._policy.script.max_model_len}
        return web.json_response(answer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            chat = msgspec.json.decode(body, type=ChatRequest)
        except msgspec.DecodeError as error:
            return _refusal(400, str(error))
        models = self._policy.script.models
        if chat.model and chat.model not in models:
            return _refusal(404, f"The model `{chat.model}` does not exist.", param="model")
        if chat.n not in (None, 1):
            return _refusal(400, "the scripted policy answers with one choice", param="n")
        try:
            reply = self._policy.answer(chat)
        except (ModelError, TypeError, OverflowError) as error:
            return _refusal(400, str(error), param="input_tokens" if "maximum context" in str(error) else None)
        misbehave = self._misbehaves(reply, body)
        if reply.turn.delay_s:
            await asyncio.sleep(reply.turn.delay_s)
        return await self._reply(request, chat, reply, misbehave=misbehave)

    async def _reply(
        self, request: web.Request, chat: ChatRequest, reply: Reply, *, misbehave: bool
    ) -> web.StreamResponse:
        request_id = request.headers.get("x-request-id", "")
        status = reply.turn.fail_status
        if misbehave and status is not None:
            self._journal.write(request_id, reply, "failed", tokens=0, http_status=status)
            return _refusal(status, "the script says so")
        out = wire.ChatWire(
            chat,
            reply,
            self._policy.tokenizer,
            call_id=request_id or f"{time.time_ns():x}",
            model=chat.model or self._policy.script.models[0],
            created=int(time.time()),
        )
        cut = reply.turn.break_after_tokens if misbehave else None
        if chat.stream:
            return await self._stream(request, out, reply, request_id, cut)
        if cut is not None:
            self._journal.write(request_id, reply, "broken", tokens=min(cut, len(reply.ids)))
            return await _half(request, out.whole())
        gone = request.transport is None or request.transport.is_closing()
        self._journal.write(request_id, reply, "aborted" if gone else "ok", tokens=len(reply.ids))
        return web.Response(body=out.whole(), content_type=_JSON)

    async def _stream(
        self, request: web.Request, out: wire.ChatWire, reply: Reply, request_id: str, cut: int | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        per_chunk = self._policy.script.tokens_per_chunk if cut is None else 1
        pause_s = reply.turn.chunk_delay_s
        sent, waiting = 0, b""
        try:
            for tokens, event in out.chunks(per_chunk):
                if cut is not None and tokens > cut:
                    break
                if pause_s:
                    await asyncio.sleep(pause_s)
                    await response.write(event)
                else:
                    waiting += event
                sent = tokens
            if cut is not None:
                self._journal.write(request_id, reply, "broken", tokens=sent)
                await response.write(waiting)
                _abort(request)
                return response
            await response.write(waiting)
        except ConnectionError:
            self._journal.write(request_id, reply, "aborted", tokens=sent)
            return response
        self._journal.write(request_id, reply, "ok", tokens=len(reply.ids))
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    def _misbehaves(self, reply: Reply, body: bytes) -> bool:
        """Whether this request fails or breaks. One request is the same in any key order, streamed or not."""
        if reply.turn.fail_status is None and reply.turn.break_after_tokens is None:
            return False
        fields = msgspec.json.decode(body)
        for name in ("stream", "stream_options"):
            fields.pop(name, None)
        key = hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=16).digest()
        self._seen[key] += 1
        return self._seen[key] <= reply.turn.fail_times


def _refusal(status: int, message: str, *, param: str | None = None) -> web.Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError"}
    body = wire.error_body(message, kinds.get(status, "InternalServerError"), status, param)
    return web.Response(status=status, body=body, content_type=_JSON)


async def _half(request: web.Request, body: bytes) -> web.StreamResponse:
    """Announce the whole body, send half of it, and cut the connection."""
    response = web.StreamResponse(headers={"Content-Type": _JSON, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    _abort(request)
    return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()
