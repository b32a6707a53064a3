"""Relays before small servers in the place of gateways, and ways to talk through a relay's socket."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rollyard.gateway.relay.service import Relay, fixed_relay

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def web_server(app: web.Application, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """An application that serves; gives its URL."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    port = runner.addresses[0][1]
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def named(name: str) -> web.Application:
    """An application that says its name, and the path asked for."""

    async def say(request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response({"by": name, "path": request.path, "got": len(body)})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", say)
    return app


@asynccontextmanager
async def tcp_server(serve: Serve) -> AsyncIterator[str]:
    """A plain TCP server; gives its URL. Its connections are closed at the end."""
    writers: list[asyncio.StreamWriter] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@asynccontextmanager
async def relay_to(folder: Path, *urls: str, patience_s: float = 0.5) -> AsyncIterator[Relay]:
    async with fixed_relay(folder, urls, patience_s=patience_s, drain_s=0.2) as relay:
        yield relay


@asynccontextmanager
async def dialled(folder: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the relay's unix socket."""
    reader, writer = await asyncio.open_unix_connection(str(folder / "shared/gateway.sock"))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def client(folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client whose every connection goes through the relay."""
    connector = aiohttp.UnixConnector(str(folder / "shared/gateway.sock"), limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession("http://127.0.0.1:8400", connector=connector, timeout=timeout) as session:
        yield session


def make_certificate(key: Path, certificate: Path) -> None:
    """For `localhost`, signed by itself."""
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    of = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    command = ("openssl", "req", "-x509", *kind, *of, "-keyout", key, "-out", certificate)
    subprocess.run(command, check=True, capture_output=True)


def needs(*programs: str) -> None:
    """Skip without these programs; fail in CI."""
    missing = [name for name in programs if not any((Path(each) / name).exists() for each in os.get_exec_path())]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {', '.join(missing)}")
