"""What a sandbox of the backend `e2b` reaches. Every jail of the server has a network of its own with a few hosts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from e2b_server import running
from e2b_server.running import KEY, KEY_ENV, RunningServer

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import Labels, Plan, open_backend
from rollyard.stages.sandboxes.e2b import E2bBackend
from rollyard.stages.sandboxes.e2b_sandbox import E2bSandbox

LABELS = Labels(run="r", rollout_id="ro1", attempt=1, owner="w", created_ms=5)
GATEWAY, FILES = "127.66.0.1:8700", "127.66.0.2:80"

GET = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print("refused")
"""


@asynccontextmanager
async def web_server(name: str) -> AsyncIterator[str]:
    """A web server of this machine that says its name and by what host it was asked; its address."""

    async def say(request: web.Request) -> web.Response:
        return web.Response(text=f"{name} as {request.headers['Host']} {request.path}")

    app = web.Application()
    app.router.add_get("/{tail:.*}", say)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    if missing := running.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    async with web_server("gateway") as gateway, web_server("files") as files:
        internet = ["--internet", f"{GATEWAY}={gateway}", "--internet", f"{FILES}={files}"]
        async with RunningServer.started(*internet, "--name", "files.test=127.66.0.2") as started:
            yield started


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


def opened(server: RunningServer, root: Path, **settings: Any) -> E2bBackend:
    made = open_backend("e2b", server.settings(root, **{"gateway_url": f"http://{GATEWAY}", **settings}))
    assert isinstance(made, E2bBackend)
    return made


async def get(sandbox: E2bSandbox, url: str) -> str:
    said = await sandbox.exec(("python3", "-c", GET, url), timeout_s=30)
    assert said.exit_code == 0, said.stderr
    return said.stdout.decode().strip()


async def test_the_gateway_and_nothing_else_is_reached_until_the_network_is_changed(
    server: RunningServer, tmp_path: Path
) -> None:
    async with opened(server, tmp_path) as backend:
        sandbox = await backend.create(LABELS, Plan(network="gateway"))
        assert sandbox.gateway_url == "http://127.0.0.1:8400"
        assert (await get(sandbox, f"{sandbox.gateway_url}/v1/models")).startswith("gateway as ")
        assert await get(sandbox, "http://files.test/") == "refused"
        settings = next(iter((await server.state())["sandboxes"].values()))["settings"]
        assert settings["network"] == {"allowOut": ["127.66.0.1/32"], "denyOut": ["0.0.0.0/0"]}

        await sandbox.set_network("open")
        assert (await get(sandbox, "http://files.test/x")).startswith("files as files.test /x")
        await sandbox.set_network("none")
        assert await get(sandbox, "http://files.test/") == "refused"
        assert (await get(sandbox, f"{sandbox.gateway_url}/v1/models")).startswith(("refused", "502"))
        await sandbox.set_network("gateway")
        again = await backend.open(sandbox.ref)
        assert again.gateway_url == sandbox.gateway_url
        assert (await get(again, f"{again.gateway_url}/v1/models")).startswith("gateway as ")


async def test_hosts_of_the_allow_list_are_reached_by_name(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path) as backend:
        sandbox = await backend.create(LABELS, Plan(network="allow", allow_hosts=("files.test",)))
        assert (await get(sandbox, "http://files.test/")).startswith("files as files.test")
        assert await get(sandbox, "http://127.66.0.2/") == "refused"  # the same host, not by its name
        assert (await get(sandbox, f"{sandbox.gateway_url}/")).startswith("gateway as ")
        assert ("files.test:80", True) in {(host, allowed) for host, allowed in (await server.state())["egress"]}


async def test_without_a_network_there_is_no_gateway(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path) as backend:
        sandbox = await backend.create(LABELS, Plan(network="none"))
        assert sandbox.gateway_url is None
        assert await get(sandbox, "http://files.test/") == "refused"
        assert await get(sandbox, f"http://{GATEWAY}/") == "refused"


async def test_a_gateway_without_a_public_address_is_named(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, gateway_url="") as backend:
        with pytest.raises(SandboxError, match=r"\[gateway\] url"):
            await backend.create(LABELS, Plan(network="gateway"))
    async with opened(server, tmp_path, gateway_url="http://no-such-host.invalid") as backend:
        with pytest.raises(SandboxError, match="has no address"):
            await backend.create(LABELS, Plan(network="gateway"))
    assert (await server.state())["sandboxes"] == {}
