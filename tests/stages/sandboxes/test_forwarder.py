"""The forwarders, by real interpreters: from a port of a network of its own to a unix socket, or to a URL."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import ssl
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from relays import make_certificate, needs, relay_to, tcp_server, web_server

from rollyard.pipeline.embedded import free_port
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes import door
from rollyard.stages.sandboxes.door import forwarder_argv

MIB = 1 << 20


def interpreters() -> list[str]:
    """This Python, the oldest one here that it must run on, and Perl."""
    oldest = sorted(Path.home().glob(".pyenv/versions/3.[6-9]*/bin/python3"))
    return [sys.executable, *map(str, oldest[:1]), "perl"]


def name(interpreter: str) -> str:
    path = Path(interpreter)
    return path.parts[-3] if "versions" in path.parts else path.name


every_interpreter = pytest.mark.parametrize("interpreter", interpreters(), ids=name)


def less_patient(file: str) -> str:
    text = (Path(door.__file__).parent / file).read_text()
    # Perl counts whole seconds: its 2 are between 1 and 2.
    shorter = text.replace("PATIENCE_S = 5.0", "PATIENCE_S = 1.0").replace("(32768, 65536, 5)", "(32768, 65536, 2)")
    assert shorter != text
    return shorter


@asynccontextmanager
async def forwarder(
    target: str, interpreter: str, monkeypatch: pytest.MonkeyPatch, **env: str
) -> AsyncIterator[tuple[str, Process]]:
    """A forwarder on a free port; gives its URL."""
    needs("sh", "perl")
    port = free_port()
    monkeypatch.setattr(door, "GATEWAY_PORT", port)
    monkeypatch.setattr(door, "_program", less_patient)
    process = await asyncio.create_subprocess_exec(
        *forwarder_argv(target, interpreter), stdin=DEVNULL, stdout=PIPE, env=os.environ | env
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"listening\n"
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def echoing() -> web.Application:
    async def say(request: web.Request) -> web.Response:
        digest = hashlib.sha256()
        async for part in request.content.iter_chunked(65_536):
            digest.update(part)
        host, connection = request.headers["Host"], request.headers.get("Connection", "")
        return web.json_response({"host": host, "connection": connection, "sha": digest.hexdigest()})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", say)
    return app


@every_interpreter
async def test_requests_bodies_and_many_connections_pass(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = str(tmp_path / "relay/shared/gateway.sock")
    body = os.urandom(4 * MIB)
    async with (
        web_server(echoing()) as gateway,
        relay_to(tmp_path / "relay", gateway),
        forwarder(socket, interpreter, monkeypatch) as (url, process),
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        for _ in range(2):
            async with http.post("/", data=memoryview(body)[: MIB // 2]) as reply:
                assert (await reply.json())["host"] == url.removeprefix("http://"), "raw bytes"

        async def one(number: int) -> None:
            part = body[number : number + 50_000]
            async with http.post("/", data=part) as reply:
                assert (await reply.json())["sha"] == hashlib.sha256(part).hexdigest()

        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(one(number))
        resident_kb = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4
        assert resident_kb < 24_000


@every_interpreter
async def test_halves_of_connections_end_by_themselves(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.read())
        await writer.drain()

    socket = str(tmp_path / "relay/shared/gateway.sock")
    async with (
        tcp_server(after_the_end) as gateway,
        relay_to(tmp_path / "relay", gateway),
        forwarder(socket, interpreter, monkeypatch) as (url, _),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"you said hello"
        writer.close()


@every_interpreter
async def test_parts_of_a_stream_are_not_held_back(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(5):
            await response.write(f"{number}\n".encode())
            await turn.wait()
            turn.clear()
        return response

    app = web.Application()
    app.router.add_get("/", stream)
    async with (
        web_server(app) as gateway,
        forwarder(gateway, interpreter, monkeypatch) as (url, _),
        aiohttp.ClientSession(url) as http,
        http.get("/") as reply,
    ):
        for number in range(5):
            assert await reply.content.readline() == f"{number}\n".encode()
            turn.set()


@every_interpreter
async def test_a_slow_reader_slows_the_writer_down(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()
            written += 65_536

    async with tcp_server(flood) as gateway, forwarder(gateway, interpreter, monkeypatch) as (url, process):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        before = -1
        while before != written or not written:
            before = written
            await asyncio.sleep(0.3)
        await reader.readexactly(before)
        assert written > before
        writer.close()
        await asyncio.sleep(0.2)
        assert process.returncode is None, "an agent that leaves does not end it"


@every_interpreter
async def test_towards_a_url_the_host_is_that_of_the_url(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        web_server(echoing()) as gateway,
        forwarder(gateway.replace("127.0.0.1", "localhost"), interpreter, monkeypatch) as (url, _),
        aiohttp.ClientSession(url) as http,
    ):
        for number in range(3):
            async with http.post("/", data=b"x" * number) as reply:
                said = await reply.json()
                assert said["host"] == gateway.replace("http://127.0.0.1", "localhost")
                assert said["connection"].lower() == "close"
                assert said["sha"] == hashlib.sha256(b"x" * number).hexdigest()


@every_interpreter
async def test_without_a_gateway_the_agent_is_told_to_come_again(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        forwarder(str(tmp_path / "nothing.sock"), interpreter, monkeypatch) as (url, _),
        aiohttp.ClientSession(url) as http,
        http.post("/v1/messages", data=b"x") as reply,
    ):
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "2"
        said = await reply.json()
        assert (said["type"], said["error"]["type"]) == ("error", "overloaded_error")


@every_interpreter
async def test_a_relay_that_starts_again_in_the_meantime_is_waited_for(
    tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = str(tmp_path / "relay/shared/gateway.sock")
    async with (
        web_server(echoing()) as gateway,
        forwarder(socket, interpreter, monkeypatch) as (url, _),
        aiohttp.ClientSession(url) as http,
    ):
        asking = asyncio.create_task(http.get("/"))
        await asyncio.sleep(0.5)
        async with relay_to(tmp_path / "relay", gateway), await asking as reply:
            assert reply.status == 200


@every_interpreter
async def test_a_port_that_is_taken_is_said(tmp_path: Path, interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with forwarder("/nothing.sock", interpreter, monkeypatch):
        command = forwarder_argv("/nothing.sock", interpreter)
        second = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stderr=PIPE)
        _, said = await second.communicate()
        assert second.returncode == 0
        assert b"of 127.0.0.1" in said


async def test_https_by_the_name_of_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    names: list[str] = []
    context.sni_callback = lambda _socket, name, _context: names.append(str(name))
    runner = web.AppRunner(echoing())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    target = f"https://localhost:{runner.addresses[0][1]}"
    body = os.urandom(3 * MIB)
    try:
        async with (
            forwarder(target, "", monkeypatch, SSL_CERT_FILE=str(certificate)) as (url, _),
            aiohttp.ClientSession(url) as http,
            http.post("/", data=memoryview(body)[:MIB]) as reply,
        ):
            said = await reply.json()
        assert said["sha"] == hashlib.sha256(body[:MIB]).hexdigest()
        assert said["host"] == target.removeprefix("https://")
        assert names == ["localhost"]
        async with (
            forwarder(target, "", monkeypatch) as (url, _),
            aiohttp.ClientSession(url) as http,
            http.get("/") as reply,
        ):
            assert reply.status == 503, "nobody vouches for that certificate"
    finally:
        await runner.cleanup()


def test_perl_says_that_https_needs_python() -> None:
    needs("perl")
    done = subprocess.run(forwarder_argv("https://gateway.example", "perl"), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"needs python3" in done.stderr


def test_python_is_taken_where_there_is_one_else_perl_else_an_error(tmp_path: Path) -> None:
    needs("perl", "busybox")
    for tool in ("sh", "echo"):
        (tmp_path / tool).symlink_to(shutil.which("busybox") or "")
    argv = forwarder_argv("https://gateway.example")
    nothing = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    assert nothing.returncode == 127
    assert b"no python3 and no perl" in nothing.stderr
    (tmp_path / "perl").symlink_to(shutil.which("perl") or "")
    perl = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    assert b"needs python3" in perl.stderr


def test_a_target_that_is_none_is_refused() -> None:
    with pytest.raises(SandboxError):
        forwarder_argv("gateway:8400")
