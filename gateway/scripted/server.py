"""The HTTP side of the scripted policy: requests in, replies out, as slowly and as badly as the script says.

What is asked for and answered is the flavour's: see vllm_api.py and sglang_api.py.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec
from aiohttp import web

from rollyard.gateway.scripted import wire
from rollyard.gateway.scripted.asked import Asked
from rollyard.gateway.scripted.control import Control, Running
from rollyard.gateway.scripted.journal import Journal
from rollyard.gateway.scripted.policy import Reply, ScriptedPolicy
from rollyard.gateway.scripted.wire import Wire
from rollyard.schemas.errors import ModelError

JSON = "application/json"
_NOT_COUNTED = ("stream", "stream_options", "rid")


class Request(Protocol):
    """What the three kinds of requests have in common."""

    @property
    def stream(self) -> bool | None:
        """Whether the reply is wanted in pieces."""
        ...

    def asked(self) -> Asked:
        """What the policy is asked for."""
        ...


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Text or messages to turn into ids."""

    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None


class ScriptedServer:
    """Serves one policy. It remembers how often each request came, so that failures come to an end."""

    def __init__(self, policy: ScriptedPolicy, journal: Journal) -> None:
        self.policy = policy
        self.control = Control()
        self._journal = journal
        self._seen: Counter[bytes] = Counter()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """What every flavour has."""
        router.add_get("/health", self._health)
        router.add_post("/tokenize", self._tokenize)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=TokenizeRequest)
            if body.messages is not None:
                ids = self.policy.renderer.prompt(body.messages, body.tools)
            else:
                ids = self.policy.tokenizer.encode_rendered(body.prompt or "", "")
        except (msgspec.DecodeError, ModelError) as error:
            return refusal(400, str(error))
        answer = {"tokens": ids.tolist(), "count": len(ids), "max_model_len": self.policy.script.max_model_len}
        return web.json_response(answer)

    async def answer(
        self, request: web.Request, asked: Request, make_wire: Callable[[Reply], Wire], *, rid: str
    ) -> web.StreamResponse:
        """The reply to a request, by the policy, in the form that `make_wire` gives it."""
        try:
            reply = self.policy.answer(asked.asked())
        except (ModelError, TypeError, OverflowError) as error:
            return refusal(400, str(error), param="input_tokens" if "maximum context" in str(error) else None)
        misbehave = self._misbehaves(reply, await request.read())
        async with self.control.running(rid) as running:
            going = await self.control.step(running, reply.turn.delay_s)
            reply = reply if going or asked.stream else reply.cut(0)
            return await self._reply(request, asked, reply, make_wire, running, misbehave=misbehave)

    async def _reply(
        self,
        request: web.Request,
        asked: Request,
        reply: Reply,
        make_wire: Callable[[Reply], Wire],
        running: Running,
        *,
        misbehave: bool,
    ) -> web.StreamResponse:
        request_id = request.headers.get("x-request-id", running.rid)
        status = reply.turn.fail_status
        if misbehave and status is not None:
            self._journal.write(request_id, reply, "failed", tokens=0, http_status=status)
            return refusal(status, "the script says so")
        out = make_wire(reply)
        cut = reply.turn.break_after_tokens if misbehave else None
        if asked.stream:
            return await self._stream(request, out, reply, request_id, running=running, cut=cut)
        if cut is not None:
            self._journal.write(request_id, reply, "broken", tokens=min(cut, len(reply.ids)))
            return await _half(request, out.whole())
        gone = request.transport is None or request.transport.is_closing()
        ended = "aborted" if gone or running.aborted.is_set() else "ok"
        self._journal.write(request_id, reply, ended, tokens=len(reply.ids))
        return web.Response(body=out.whole(), content_type=JSON)

    async def _stream(
        self,
        request: web.Request,
        out: Wire,
        reply: Reply,
        request_id: str,
        *,
        running: Running,
        cut: int | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        per_chunk = self.policy.script.tokens_per_chunk if cut is None else 1
        pause_s = reply.turn.chunk_delay_s
        sent, waiting, status = 0, b"", "ok" if cut is None else "broken"
        try:
            for tokens, event in out.chunks(per_chunk):
                if cut is not None and tokens > cut:
                    break
                if not await self.control.step(running, pause_s):
                    waiting, status = waiting + out.aborted(sent), "aborted"
                    break
                waiting += event
                sent = tokens
                if pause_s:
                    await response.write(waiting)
                    waiting = b""
            if status == "broken":
                self._journal.write(request_id, reply, status, tokens=sent)
                await response.write(waiting)
                _abort(request)
                return response
            await response.write(waiting)
        except ConnectionError:
            self._journal.write(request_id, reply, "aborted", tokens=sent)
            return response
        self._journal.write(request_id, reply, status, tokens=sent)
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    def _misbehaves(self, reply: Reply, body: bytes) -> bool:
        """Whether this request fails or breaks. One request is the same in any key order, streamed or not."""
        if reply.turn.fail_status is None and reply.turn.break_after_tokens is None:
            return False
        fields = msgspec.json.decode(body)
        for name in _NOT_COUNTED:
            fields.pop(name, None)
        key = hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=16).digest()
        self._seen[key] += 1
        return self._seen[key] <= reply.turn.fail_times


def refusal(status: int, message: str, *, param: str | None = None) -> web.Response:
    """An HTTP error in the servers' JSON."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError"}
    body = wire.error_body(message, kinds.get(status, "InternalServerError"), status, param)
    return web.Response(status=status, body=body, content_type=JSON)


async def _half(request: web.Request, body: bytes) -> web.StreamResponse:
    """Announce the whole body, send half of it, and cut the connection."""
    response = web.StreamResponse(headers={"Content-Type": JSON, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    _abort(request)
    return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()
