"""The daemon's side: `/health`, `/files`, `process.Process/*` and `filesystem.Filesystem/*` of one sandbox."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import posixpath
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import BodyPartReader, web

from e2b_server import connect
from e2b_server.connect import ConnectError
from e2b_server.jail import HOME, USERS, JailError, uid_of
from e2b_server.processes import Listener, Process

if TYPE_CHECKING:
    from e2b_server.control import Box

_NOT_FOUND: Final = frozenset({"ENOENT", "ENOTDIR"})


async def handle(request: web.Request, box: Box) -> web.StreamResponse:
    """One request to the daemon in a sandbox."""
    path = request.path
    if path == "/health":
        return web.Response(status=204)
    if request.headers.get("X-Access-Token") != box.token:
        return web.json_response({"code": 401, "message": "unauthorized access"}, status=401)
    if path == "/files":
        return await (_read(request, box) if request.method == "GET" else _write(request, box))
    if path in ("/process.Process/Start", "/process.Process/Connect"):
        return await _stream(request, box)
    try:
        call = _UNARY.get(path)
        if call is None:
            raise ConnectError("unimplemented", f"{path} is not known")
        return web.json_response(await call(box, await request.json()))
    except ConnectError as error:
        return connect.unary_error(error)
    except JailError as error:
        code = "not_found" if error.name in _NOT_FOUND else "already_exists" if error.name == "EEXIST" else "internal"
        return connect.unary_error(ConnectError(code, str(error)))


def _user(request: web.Request) -> str:
    """Who is asked for by Basic auth or in the query."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    name = base64.b64decode(value).decode().partition(":")[0] if kind == "Basic" else ""
    return name or request.query.get("username") or "user"


def _resolve(path: str, user: str = "user") -> str:
    home = USERS[user][1] if user in USERS else HOME
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return posixpath.normpath(posixpath.join(home, path))


def _problem(error: JailError, path: str) -> web.Response:
    status = 404 if error.name in _NOT_FOUND else 400 if error.name == "EISDIR" else 500
    text = {404: f"path '{path}' does not exist", 400: f"path '{path}' is a directory"}.get(status, str(error))
    if error.name == "EUSER":
        status, text = 401, str(error)
    if error.name == "ENOSPC":
        status, text = 507, "not enough disk space available"
    return web.json_response({"code": status, "message": text}, status=status)


async def _read(request: web.Request, box: Box) -> web.StreamResponse:
    path = _resolve(request.query.get("path", ""), _user(request))
    try:
        _, fds = await box.jail.ask("open", path=path, write=False)
    except JailError as error:
        return _problem(error, path)
    with os.fdopen(fds[0], "rb") as file:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = os.fstat(file.fileno()).st_size
        await response.prepare(request)
        while data := file.read(1 << 18):
            await response.write(data)
        await response.write_eof()
        return response


async def _write(request: web.Request, box: Box) -> web.Response:
    user = _user(request)
    named = request.query.get("path")
    written = []
    path = ""
    try:
        uid = uid_of(user)
        if request.content_type.startswith("multipart/"):
            async for part in await request.multipart():
                if isinstance(part, BodyPartReader) and part.name == "file":
                    path = _resolve(named or part.filename or "", user)
                    await _store(box, path, bytes(await part.read(decode=True)), uid)
                    written.append(path)
        else:
            path = _resolve(named or "", user)
            data = await request.read()
            if request.headers.get("Content-Encoding") == "gzip" and data[:2] == b"\x1f\x8b":
                data = gzip.decompress(data)
            await _store(box, path, data, uid)
            written.append(path)
    except JailError as error:
        return _problem(error, path)
    return web.json_response([{"path": p, "name": posixpath.basename(p), "type": "file"} for p in written])


async def _store(box: Box, path: str, data: bytes, uid: int) -> None:
    _, fds = await box.jail.ask("open", path=path, write=True, uid=uid)
    with os.fdopen(fds[0], "wb") as file:
        await asyncio.to_thread(file.write, data)


async def _stream(request: web.Request, box: Box) -> web.StreamResponse:
    """Start a command, or connect to one, and stream its events. What fails is told in the last frame."""
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    listener = None
    deadline_s = connect.timeout_s(request)
    try:
        async with asyncio.timeout(deadline_s or None):
            process, listener = await _opened(request, box, deadline_s)
            await response.prepare(request)
            await response.write(connect.frame({"event": {"start": {"pid": process.pid}}}))
            while (event := await listener.queue.get()) is not None:
                await response.write(connect.frame(event))
        last: dict[str, Any] = {}
        if process.end is None:
            last = {"error": ConnectError("unavailable", "the connection to the sandbox ended").body()}
    except TimeoutError:
        last = {"error": {"code": "deadline_exceeded", "message": "context deadline exceeded"}}
    except ConnectError as error:
        last = {"error": error.body()}
    except JailError as error:
        code = "unauthenticated" if error.name == "EUSER" else "invalid_argument"
        last = {"error": {"code": code, "message": str(error)}}
    finally:
        if listener is not None:
            listener.leave()
    if not response.prepared:
        await response.prepare(request)
    await response.write(connect.frame(last, last=True))
    await response.write_eof()
    return response


async def _opened(request: web.Request, box: Box, deadline_s: float) -> tuple[Process, Listener]:
    ask = await connect.one_message(request)
    if request.path.endswith("/Start"):
        return await box.processes.start(ask, _user(request), deadline_s)
    process = _find(box, ask, ended=True)
    return process, process.listen()


def _find(box: Box, ask: Mapping[str, Any], *, ended: bool = False) -> Process:
    selector = ask.get("process", {})
    process = box.processes.find(selector, ended=ended)
    if process is None:
        raise ConnectError("not_found", f"process with pid {selector.get('pid')} not found")
    return process


def _input(ask: Mapping[str, Any]) -> bytes:
    given = ask.get("input", {})
    return base64.b64decode(given.get("stdin") or given.get("pty") or "")


async def _list(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    shown = []
    for process in box.processes.running():
        tag = {"tag": process.tag} if process.tag else {}
        shown.append({"pid": process.pid, "config": dict(process.config), **tag})
    return {"processes": shown}


async def _send_input(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    await _find(box, ask).write(_input(ask["input"] and ask))
    return {}


async def _close_stdin(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    _find(box, ask).close_stdin()
    return {}


async def _send_signal(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}
    number = numbers.get(ask.get("signal", ""))
    if number is None:
        raise ConnectError("unimplemented", f"invalid signal: {ask.get('signal')}")
    await box.processes.kill(_find(box, ask), number)
    return {}


async def _update(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    size = ask.get("pty", {}).get("size", {})
    _find(box, ask).resize(size.get("rows", 24), size.get("cols", 80))
    return {}


async def _stat(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    return {"entry": (await box.jail.ask("stat", path=_resolve(ask["path"])))[0]["entry"]}


async def _list_dir(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    reply, _ = await box.jail.ask("list", path=_resolve(ask["path"]), depth=ask.get("depth", 1))
    return {"entries": reply["entries"]}


async def _make_dir(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    return {"entry": (await box.jail.ask("mkdir", path=_resolve(ask["path"])))[0]["entry"]}


async def _move(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    reply, _ = await box.jail.ask("move", path=_resolve(ask["source"]), target=_resolve(ask["destination"]))
    return {"entry": reply["entry"]}


async def _remove(box: Box, ask: Mapping[str, Any]) -> dict[str, Any]:
    await box.jail.ask("remove", path=_resolve(ask["path"]))
    return {}


_UNARY: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], Awaitable[dict[str, Any]]]]] = {
    "/process.Process/List": _list,
    "/process.Process/SendInput": _send_input,
    "/process.Process/CloseStdin": _close_stdin,
    "/process.Process/SendSignal": _send_signal,
    "/process.Process/Update": _update,
    "/filesystem.Filesystem/Stat": _stat,
    "/filesystem.Filesystem/ListDir": _list_dir,
    "/filesystem.Filesystem/MakeDir": _make_dir,
    "/filesystem.Filesystem/Move": _move,
    "/filesystem.Filesystem/Remove": _remove,
}
