"""The pool over HTTP, for programs that do not speak NATS: under /admin, with the admin token and nothing else.

GET /admin/servers; PUT and DELETE /admin/servers/{id}; POST /admin/servers/{id}/pause, /resume, /drain; and
POST /admin/weights, which answers when the update is over.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
import structlog
from aiohttp import web

from rollyard.gateway.desk import PoolDesk
from rollyard.gateway.refusal import Refusal, unavailable
from rollyard.schemas.errors import BusError, ConfigError, WaitTimeout
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.weights import WeightUpdate

log = structlog.get_logger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DRAIN_TIMEOUT_S: Final = 600.0


def admin_routes(desk: PoolDesk, token: bytes) -> list[web.RouteDef]:
    """The routes. An empty token switches them off: they answer 403 and say so."""
    admin = _Admin(desk, token)
    return [
        web.get("/admin/servers", admin.guarded(admin.list)),
        web.put("/admin/servers/{id}", admin.guarded(admin.put)),
        web.delete("/admin/servers/{id}", admin.guarded(admin.remove)),
        web.post("/admin/servers/{id}/{what:pause|resume|drain}", admin.guarded(admin.change)),
        web.post("/admin/weights", admin.guarded(admin.weights)),
    ]


class _Admin:
    def __init__(self, desk: PoolDesk, token: bytes) -> None:
        self._desk = desk
        self._token = token

    def guarded(self, handler: Handler) -> Handler:
        """The handler behind the token, with errors as JSON."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._check(request)
                return await handler(request)
            except Refusal as refusal:
                answer = refusal
            except ConfigError as error:
                answer = Refusal(400, "invalid_request", error.message, hint=error.hint)
            except WaitTimeout as error:
                answer = Refusal(504, "timeout", error.message, hint=error.hint)
            except BusError as error:
                answer = unavailable(error.message, code="bus_unavailable", hint=error.hint)
            return web.Response(
                status=answer.status, body=answer.body(), content_type="application/json", headers=answer.headers()
            )

        return handle

    def _check(self, request: web.Request) -> None:
        """Raises Refusal: 403 while switched off or for a wrong token, 401 without one."""
        if not self._token:
            raise Refusal(
                403,
                "admin_off",
                "the admin endpoints are switched off",
                hint="set the variable or the file of [gateway] admin_token_env, admin_token_file",
            )
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Refusal(401, "admin_token_missing", "send the admin token", hint="Authorization: Bearer <token>")
        if not hmac.compare_digest(given.strip().encode(errors="replace"), self._token):
            log.warning("admin_token_wrong", path=request.path)
            raise Refusal(403, "admin_token_wrong", "this is not the admin token", hint="a session key does not do")

    async def list(self, _request: web.Request) -> web.Response:
        """Every entry, and what this gateway sees there."""
        views = {view.server_id: view for view in self._desk.pool.view()}
        servers = [
            {**msgspec.to_builtins(server), "view": msgspec.to_builtins(views.get(server.server_id))}
            for server in await self._desk.servers.all()
        ]
        return _json({"servers": servers})

    async def put(self, request: web.Request) -> web.Response:
        """Add a server, or replace its entry: the body is an LlmServer. `?replaces=ID` puts it in another's place."""
        server_id = request.match_info["id"]
        fields = _decode(await request.read(), dict[str, Any])
        if fields.setdefault("server_id", server_id) != server_id:
            raise Refusal(400, "invalid_request", "server_id of the body is not that of the path", hint="leave it out")
        server, old = _convert(fields, LlmServer), request.query.get("replaces")
        if old is None:
            await self._desk.servers.add(server)
        else:
            timeout_s, gateways = _seconds(request), self._desk.gateways()
            await self._desk.servers.swap(old, server, timeout_s=timeout_s, gateways=gateways)
        return _json({"server_id": server_id})

    async def remove(self, request: web.Request) -> web.Response:
        """Take a server out of the pool."""
        server_id = await self._known(request)
        await self._desk.servers.remove(server_id)
        return _json({"server_id": server_id})

    async def change(self, request: web.Request) -> web.Response:
        """Pause, resume or drain a server. Drain answers when no call runs there; `?timeout_s=` bounds that."""
        server_id, servers = await self._known(request), self._desk.servers
        match request.match_info["what"]:
            case "pause":
                await servers.pause(server_id)
            case "resume":
                await servers.resume(server_id)
            case _:
                await servers.drain(server_id, timeout_s=_seconds(request), gateways=self._desk.gateways())
        entry, _ = await servers.get(server_id)
        return _json({"server_id": server_id, "state": entry.state})

    async def weights(self, request: web.Request) -> web.Response:
        """Carry out a weight update: the body is a WeightUpdate without update_id. 502 when a server failed."""
        fields = {**_decode(await request.read(), dict[str, Any]), "update_id": uuid4().hex}
        report = await self._desk.update(_convert(fields, WeightUpdate), lambda _progress: None)
        return _json(msgspec.to_builtins(report), status=502 if report.failed else 200)

    async def _known(self, request: web.Request) -> str:
        server_id = request.match_info["id"]
        try:
            await self._desk.servers.get(server_id)
        except ConfigError as error:
            raise Refusal(404, "no_such_server", error.message, hint="GET /admin/servers lists them") from None
        return server_id


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refusal(400, "invalid_request", f"the body is not what is wanted: {error}") from None


def _convert(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise Refusal(400, "invalid_request", str(error), hint=f"`rollyard schema {kind.__name__}`") from None


def _seconds(request: web.Request) -> float:
    text = request.query.get("timeout_s", str(DRAIN_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        raise Refusal(400, "invalid_request", f"timeout_s is a number of seconds, not {text[:40]!r}") from None
    if not 0 < seconds < 86_400:
        raise Refusal(400, "invalid_request", "timeout_s is between 0 and 86400")
    return seconds
