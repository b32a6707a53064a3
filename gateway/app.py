"""The HTTP side: routes, keys, errors in the agent's protocol, streams. What a call is stands in gateway/call.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import msgspec
import structlog
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rollyard.gateway.admin import admin_routes
from rollyard.gateway.agent_ids import agent_ids
from rollyard.gateway.calls import Gateway
from rollyard.gateway.count import count_tokens
from rollyard.gateway.exchange import ModelRequest, Update
from rollyard.gateway.keys import SessionGrant, verify
from rollyard.gateway.protocols import protocol_of, protocols
from rollyard.gateway.protocols.messages_count import COUNT_PATH, count_reply, parse_count
from rollyard.gateway.protocols.protocol import Protocol, ReplyStream
from rollyard.gateway.refusal import Refusal, internal_error, session_closed
from rollyard.gateway.scenario import classify
from rollyard.gateway.stream import AgentStream

log = structlog.get_logger(__name__)

GATEWAY: Final = web.AppKey("gateway", Gateway)
SERVED: Final = web.AppKey("served", set[web.RequestHandler])
"""Connections that have sent a whole request."""
# What is larger would hold up all other agents while it is parsed.
PARSED_INLINE_BYTES: Final = 1 << 20
_JSON: Final = "application/json"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(gateway: Gateway) -> web.Application:
    """The application of one gateway process."""
    app = web.Application(middlewares=[_errors], client_max_size=gateway.settings.max_body_bytes)
    app[GATEWAY] = gateway
    app[SERVED] = set()
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_routes(admin_routes(gateway.desk, gateway.settings.admin_token))
    for prefix in ("", "/s/{key}"):
        app.router.add_get(f"{prefix}/v1/models", _models)
        app.router.add_get(f"{prefix}/v1/responses", _no_websocket)
        app.router.add_post(f"{prefix}{COUNT_PATH}", _count)
        for protocol in protocols():
            app.router.add_post(f"{prefix}{protocol.path}", _calls(protocol))
    return app


def authenticate(request: web.Request) -> SessionGrant:
    """The grant of a request's key, from path, x-api-key or bearer token. Raises Refusal: 401, 410."""
    gateway = request.app[GATEWAY]
    key: str = request.match_info.get("key", "") or request.headers.get("x-api-key", "")
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if not key and scheme.lower() == "bearer":
        key = token.strip()
    grant = verify(key, gateway.settings.secret)
    if grant.session() in gateway.closed:
        raise session_closed()
    return grant


def _calls(protocol: Protocol) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        grant = authenticate(request)
        asked = await _asked(request, protocol)
        gateway = request.app[GATEWAY]
        if asked.stream:
            async with aclosing(gateway.updates(grant, asked)) as updates:
                return await _stream(request, protocol.stream(asked), updates)
        finished = await gateway.finished(grant, asked)
        headers = _call_headers(finished[0].call_id)
        return web.Response(body=protocol.reply(asked, finished), content_type=_JSON, headers=headers)

    return handle


async def _asked(request: web.Request, protocol: Protocol) -> ModelRequest:
    """What the agent asks for, with what it says of itself. Raises Refusal."""
    body = await _body(request)
    if len(body) < PARSED_INLINE_BYTES:
        asked = protocol.parse(body, request.headers)
    else:
        asked = await asyncio.to_thread(protocol.parse, body, request.headers)
    asked = structs.replace(asked, ids=agent_ids(request.headers, asked), body_bytes=len(body))
    return structs.replace(asked, scenario=classify(asked))


async def _body(request: web.Request) -> bytes:
    limit_s = request.app[GATEWAY].settings.read_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except web.RequestPayloadError as error:
        what = " ".join(str(error).split())
        raise Refusal(400, "invalid_request", f"the request body cannot be read: {what[:200]}") from None
    except TimeoutError:
        raise Refusal(408, "request_timeout", f"the request body did not arrive within {limit_s:g} s") from None


async def _stream(
    request: web.Request, reply: ReplyStream, updates: AsyncGenerator[Update, None]
) -> web.StreamResponse:
    # Until the first update there is a status to give; after it, a stream can only be cut.
    first = await anext(updates)
    gateway = request.app[GATEWAY]
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            **_call_headers(first.call_id),
        }
    )
    await response.prepare(request)
    try:
        async with AgentStream.open(request, response, reply, gateway.settings) as stream:
            await stream.send(first)
            async for update in updates:
                await stream.send(update)
        await response.write_eof()
    except ConnectionError:
        log.info("agent_went_away", call_id=first.call_id)
    except Refusal as refusal:
        gateway.metrics.refusals.labels(refusal.code).inc()
        log.warning("stream_cut", call_id=first.call_id, code=refusal.code, error=str(refusal))
        await _cut(request, response, reply.error(refusal))
    return response


async def _cut(request: web.Request, response: web.StreamResponse, last: bytes) -> None:
    """End a stream so that nobody takes it for complete."""
    try:
        await response.write(last)
    except ConnectionError:
        return
    # Closing without the terminating chunk is what a client sees as broken; what was written is flushed first.
    if request.transport is not None:
        request.transport.close()


def _call_headers(call_id: str) -> dict[str, str]:
    # OpenAI's and Anthropic's names for the same.
    return {"x-request-id": call_id, "request-id": call_id}


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[SERVED].add(request.protocol)
    try:
        return await handler(request)
    except Refusal as refusal:
        return _refuse(request, refusal)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[GATEWAY].settings.max_body_bytes
        return _refuse(request, Refusal(413, "request_too_large", f"the request body is over {limit} bytes"))
    except web.HTTPException as error:
        what = f"{request.method} {redact(request.path)}: {error.reason}"
        return _refuse(request, Refusal(error.status, "not_found" if error.status == 404 else "invalid_request", what))
    except Exception:  # the agent gets an answer in the shape that it knows, whatever is broken
        log.exception("request_failed", path=redact(request.path))
        return _refuse(request, internal_error())


def _refuse(request: web.Request, refusal: Refusal) -> web.Response:
    request.app[GATEWAY].metrics.refusals.labels(refusal.code).inc()
    status, body = protocol_of(request.path).refuse(refusal)
    return web.Response(status=status, body=body, content_type=_JSON, headers=refusal.headers())


async def _count(request: web.Request) -> web.Response:
    grant = authenticate(request)
    asked = parse_count(await _body(request), request.headers)
    count = await count_tokens(request.app[GATEWAY], grant, asked)
    return web.Response(body=count_reply(count), content_type=_JSON)


async def _no_websocket(request: web.Request) -> web.Response:
    # Codex asks for a WebSocket first; after 426, and only then, it goes on by POST at once.
    raise Refusal(426, "websocket_not_supported", "there is no WebSocket here", hint="POST to the same address")


async def _models(request: web.Request) -> web.Response:
    authenticate(request)
    served: dict[str, int] = {}
    for entry in request.app[GATEWAY].pool.entries():
        for name in (entry.server.model, *entry.server.aliases):
            served[name] = entry.max_context
    data = [
        {"id": model, "object": "model", "created": 0, "owned_by": "rollyard", "context_length": limit or None}
        for model, limit in sorted(served.items())
    ]
    return web.Response(body=msgspec.json.encode({"object": "list", "data": data}), content_type=_JSON)


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    gateway.guard.check()
    servers = gateway.pool.entries()
    healthy = sum(entry.healthy for entry in servers)
    return web.Response(text=f"ready; {healthy} of {len(servers)} model servers healthy\n")


async def _metrics(request: web.Request) -> web.Response:
    text = generate_latest(request.app[GATEWAY].metrics.registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def redact(path: str) -> str:
    """A path without the session key in it."""
    head, mark, tail = path.partition("/s/")
    if not mark or head:
        return path
    _, slash, rest = tail.partition("/")
    return f"/s/***{slash}{rest}"


class AccessLog(AbstractAccessLogger):
    """One line for each request; keys stay out of it."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """See AbstractAccessLogger; `time` is in seconds."""
        log.debug("request", method=request.method, path=redact(request.path), status=response.status, time_s=time)
