# ruff: noqa: PTH123
"""The REST side: sandboxes are made, listed, kept alive and ended; and what tests ask of the server itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from e2b_server import envd
from e2b_server.egress import ALL, Egress, Rules
from e2b_server.jail import Jail
from e2b_server.processes import Processes

MAX_LENGTH_S: Final = 24 * 3600
PAGE: Final = 100
ENVD_VERSION: Final = "0.6.7"
_NOT_MINE: Final = ("./proc", "./dev", "./usr", "./etc", "./opt/agent.py")


@dataclass
class Box:
    """One sandbox."""

    id: str
    template: str
    metadata: dict[str, str]
    jail: Jail
    processes: Processes
    egress: Egress
    rules: Rules
    settings: dict[str, Any]  # as the client gave them
    started: float = field(default_factory=time.time)
    end: float = 0.0
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    timer: asyncio.TimerHandle | None = None
    timeouts: list[int] = field(default_factory=list)

    def created(self) -> dict[str, Any]:
        """What the client of `create` and `connect` gets."""
        return {
            "templateID": self.template,
            "sandboxID": self.id,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
            "domain": None,
        }

    def info(self) -> dict[str, Any]:
        """What a listing shows."""
        return {
            "templateID": self.template,
            "sandboxID": self.id,
            "clientID": "local",
            "startedAt": _iso(self.started),
            "endAt": _iso(self.end),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "state": "running",
            "envdVersion": ENVD_VERSION,
            "metadata": self.metadata,
        }


@dataclass
class Refusal:
    """Answers that a test wants instead of the real ones."""

    method: str
    path: re.Pattern[str]
    status: int
    times: int
    headers: dict[str, str]
    after: bool  # only once the real work is done, so that the client does not learn of it

    def response(self) -> web.Response:
        """The answer."""
        body = {"code": self.status, "message": "refused by the test"}
        return web.json_response(body, status=self.status, headers=self.headers)


class Problem(Exception):
    """A reply that says what was wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """All sandboxes of one team."""

    def __init__(
        self, key: str, internet: dict[tuple[str, int], tuple[str, int]], names: Mapping[str, str], max_create: int
    ) -> None:
        self._key = key
        self._internet = internet
        self._names = names
        self._boxes: dict[str, Box] = {}
        self._snapshots: dict[str, int] = {}
        self._refusals: list[Refusal] = []
        self._connections: dict[str, set[str]] = {}
        self._requests: list[str] = []
        self._creates: Counter[str] = Counter()
        self._daemon: Counter[str] = Counter()
        self._egress: list[tuple[str, bool]] = []
        self._making = asyncio.Semaphore(max_create)
        self._most_making = 0
        self._now_making = 0
        self._keyed: dict[str, asyncio.Task[Box]] = {}

    def app(self) -> web.Application:
        """What serves it all."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/_test/"):
            return await self._test(request)
        client = request.headers.get("X-Rollyard-Client", "")
        peer = request.transport.get_extra_info("peername") if request.transport else None
        if client and peer:
            self._connections.setdefault(client, set()).add(f"{peer[1]}")
        sandbox = request.headers.get("E2b-Sandbox-Id")
        if sandbox is not None:
            box = self._boxes.get(sandbox)
            if box is None:
                gone = {"sandboxId": sandbox, "message": "The sandbox was not found", "code": 502}
                return web.json_response(gone, status=502)
            self._daemon[request.path] += 1
            return await envd.handle(request, box)
        self._requests.append(f"{request.method} {request.path}")
        refusal = self._refused(request)
        if refusal and not refusal.after:
            return refusal.response()
        if request.headers.get("X-API-KEY") != self._key:
            return web.json_response({"code": 401, "message": "Invalid API key"}, status=401)
        try:
            response = await self._control(request)
            return refusal.response() if refusal else response
        except Problem as problem:
            return web.json_response({"code": problem.status, "message": str(problem)}, status=problem.status)

    async def _control(self, request: web.Request) -> web.Response:
        for method, pattern, call in _ROUTES:
            if method == request.method and (found := re.fullmatch(pattern, request.path)):
                return await call(self, request, *(unquote(part) for part in found.groups()))
        raise Problem(404, f"no route {request.method} {request.path}")

    def _box(self, name: str) -> Box:
        if box := self._boxes.get(name):
            return box
        raise Problem(404, f"Sandbox \"{name}\" doesn't exist or you don't have access to it")

    async def create(self, request: web.Request) -> web.Response:
        """POST /v2/sandboxes. One idempotency key makes one sandbox."""
        body = await request.json()
        self._creates[request.headers.get("X-Rollyard-Client", "")] += 1
        key = request.headers.get("Idempotency-Key", "")
        work = self._keyed.get(key) or asyncio.create_task(self._make(body))
        if key:
            self._keyed[key] = work
        return web.json_response((await asyncio.shield(work)).created(), status=201)

    async def _make(self, body: Mapping[str, Any]) -> Box:
        template = body["templateID"]
        if template not in ("base", "python") and template not in self._snapshots:
            raise Problem(404, f"template '{template}' not found")
        timeout = body.get("timeout", 15)
        if timeout <= 0:
            raise Problem(400, "Timeout must be greater than 0")
        if timeout > MAX_LENGTH_S:
            raise Problem(400, f"Timeout cannot be greater than {MAX_LENGTH_S // 3600} hours")
        rules = _rules(body.get("network") or {}, body.get("allow_internet_access"))
        self._now_making += 1
        self._most_making = max(self._most_making, self._now_making)
        try:
            async with self._making:
                box = await self._start(body, template, rules)
        finally:
            self._now_making -= 1
        self._keep(box, timeout)
        return box

    async def _start(self, body: Mapping[str, Any], template: str, rules: Rules) -> Box:
        jail = await Jail.start(self._names)
        name = "i" + secrets.token_hex(10)
        egress = Egress(lambda: self._boxes[name].rules if name in self._boxes else Rules(deny=(ALL,)), self._egress)
        processes = Processes(jail, body.get("envVars") or {})
        box = Box(name, template, body.get("metadata") or {}, jail, processes, egress, rules, dict(body))
        await egress.open(jail, self._internet)
        if archive := self._snapshots.get(template):
            with open(f"/proc/self/fd/{archive}", "rb") as file, open(os.devnull, "wb") as nothing:
                await processes.run(("/bin/tar", "-x", "-C", "/"), file.fileno(), nothing.fileno())
        self._boxes[name] = box
        return box

    def _keep(self, box: Box, timeout: float, *, shorter: bool = True) -> None:
        end = min(time.time() + timeout, box.started + MAX_LENGTH_S)
        if not shorter and end < box.end:
            return
        box.end = end
        box.timeouts.append(int(timeout))
        if box.timer:
            box.timer.cancel()
        loop = asyncio.get_running_loop()
        box.timer = loop.call_later(max(0.0, end - time.time()), lambda: loop.create_task(self._end(box)))

    async def _end(self, box: Box) -> None:
        if self._boxes.pop(box.id, None) is None:
            return
        if box.timer:
            box.timer.cancel()
        box.egress.close()
        await box.jail.destroy()
        await box.processes.close()

    async def listing(self, request: web.Request) -> web.Response:
        """GET /v2/sandboxes, newest first, in pages."""
        wanted = {unquote(k): unquote(v) for k, v in parse_qsl(request.query.get("metadata", ""))}
        found = [box for box in self._boxes.values() if wanted.items() <= box.metadata.items()]
        found.sort(key=lambda box: (box.started, box.id), reverse=request.query.get("order", "desc") == "desc")
        start = int(request.query.get("nextToken") or 0)
        limit = min(int(request.query.get("limit") or PAGE), PAGE)
        page = found[start : start + limit]
        more = {"X-Next-Token": str(start + limit)} if start + limit < len(found) else {}
        return web.json_response([box.info() for box in page], headers=more)

    async def detail(self, request: web.Request, name: str) -> web.Response:
        """GET /sandboxes/{id}."""
        return web.json_response(self._box(name).info())

    async def kill(self, request: web.Request, name: str) -> web.Response:
        """DELETE /sandboxes/{id}."""
        await self._end(self._box(name))
        return web.Response(status=204)

    async def set_timeout(self, request: web.Request, name: str) -> web.Response:
        """POST /sandboxes/{id}/timeout: may shorten."""
        self._keep(self._box(name), max(0, (await request.json())["timeout"]))
        return web.Response(status=204)

    async def connect(self, request: web.Request, name: str) -> web.Response:
        """POST /v2/sandboxes/{id}/connect: never shortens."""
        box = self._box(name)
        self._keep(box, (await request.json()).get("timeout", 15), shorter=False)
        return web.json_response(box.created())

    async def network(self, request: web.Request, name: str) -> web.Response:
        """PUT /sandboxes/{id}/network: replaces the rules."""
        body = await request.json()
        box = self._box(name)
        box.rules = _rules(body, body.get("allow_internet_access"))
        box.settings["network"] = body
        return web.Response(status=204)

    async def metrics(self, request: web.Request, name: str) -> web.Response:
        """GET /sandboxes/{id}/metrics: one sample, of now."""
        box = self._box(name)
        now = time.time()
        sample = {"timestamp": _iso(now), "timestampUnix": int(now), "cpuCount": 2, "cpuUsedPct": 0.0}
        sample |= {"memUsed": box.jail.memory_bytes(), "memTotal": 512 << 20, "memCache": 0}
        return web.json_response([sample | {"diskUsed": 0, "diskTotal": 1 << 30}])

    async def snapshot(self, request: web.Request, name: str) -> web.Response:
        """POST /sandboxes/{id}/snapshots: the files, without memory."""
        box = self._box(name)
        snapshot = f"snap-{secrets.token_hex(6)}"
        with tempfile.TemporaryFile() as file, open(os.devnull, "rb") as nothing:
            leave_out = [f"--exclude={path}" for path in _NOT_MINE]
            argv = ["/bin/tar", "-c", "--one-file-system", *leave_out, "-C", "/", "."]
            if await box.processes.run(argv, nothing.fileno(), file.fileno()) not in (0, 1):
                raise Problem(500, "Error when creating snapshot")
            self._snapshots[snapshot] = os.dup(file.fileno())
        return web.json_response({"snapshotID": snapshot, "names": []}, status=201)

    async def forget(self, request: web.Request, template: str) -> web.Response:
        """DELETE /templates/{id}."""
        fd = self._snapshots.pop(template, None)
        if fd is None:
            raise Problem(404, f"template '{template}' not found")
        os.close(fd)
        return web.Response(status=204)

    def _refused(self, request: web.Request) -> Refusal | None:
        for refusal in self._refusals:
            if refusal.times and refusal.method == request.method and refusal.path.search(request.path):
                refusal.times -= 1
                return refusal
        return None

    async def _test(self, request: web.Request) -> web.Response:
        """What tests ask: refuse requests, see what came, end a sandbox behind the client's back."""
        body = json.loads(await request.text() or "{}")
        match request.path.removeprefix("/_test/"):
            case "refuse":
                headers = body.get("headers", {})
                path = re.compile(body["path"])
                after = body.get("after", False)
                self._refusals.append(Refusal(body["method"], path, body["status"], body["times"], headers, after))
            case "internet":  # sandboxes that are made from now on
                self._internet[_address(body["inside"])] = _address(body["real"])
            case "mute":  # gone, without a word to those who listen
                box = self._box(body["sandbox"])
                box.processes.mute()
                await self._end(box)
            case "kill":
                await self._end(self._box(body["sandbox"]))
            case "state":
                boxes = {
                    box.id: {"metadata": box.metadata, "settings": box.settings, "timeouts": box.timeouts}
                    for box in self._boxes.values()
                }
                connections = {client: sorted(peers) for client, peers in self._connections.items()}
                state = {"sandboxes": boxes, "connections": connections, "requests": self._requests}
                state |= {"creates": self._creates, "daemon": self._daemon}
                return web.json_response(state | {"egress": self._egress, "most_making": self._most_making})
        return web.json_response({})


_Route = Callable[..., Awaitable[web.Response]]
_ROUTES: Final[tuple[tuple[str, str, _Route], ...]] = (
    ("POST", "/v2/sandboxes", Server.create),
    ("GET", "/v2/sandboxes", Server.listing),
    ("GET", "/sandboxes/([^/]+)", Server.detail),
    ("DELETE", "/sandboxes/([^/]+)", Server.kill),
    ("POST", "/sandboxes/([^/]+)/timeout", Server.set_timeout),
    ("POST", "/v2/sandboxes/([^/]+)/connect", Server.connect),
    ("PUT", "/sandboxes/([^/]+)/network", Server.network),
    ("GET", "/sandboxes/([^/]+)/metrics", Server.metrics),
    ("POST", "/sandboxes/([^/]+)/snapshots", Server.snapshot),
    ("DELETE", "/templates/([^/]+)", Server.forget),
)


def _rules(network: Mapping[str, Any], internet: bool | None) -> Rules:
    allow, deny = tuple(network.get("allowOut") or ()), tuple(network.get("denyOut") or ())
    if problem := Rules.problem(allow, deny):
        raise Problem(400, problem)
    return Rules(allow, (*deny, ALL) if internet is False else deny)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
