"""What behaviours need outside of the sandbox: a folder, a server not to be reached, and a gateway with a relay."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from rollyard.gateway.relay.service import fixed_relay
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.conformance.bench import Setting
from rollyard.stages.sandbox import BACKENDS

CANARY: Final = "rollyard-canary"
GATEWAY: Final = "rollyard-gateway"


@asynccontextmanager
async def counterparts(backend: str, image: str, settings: Mapping[str, Any]) -> AsyncIterator[Setting]:
    """Start them, and say how to open the backend. `settings` go over those that the kit gives. Raises ConfigError."""
    can: Capabilities = BACKENDS.load(backend).capabilities
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-check-")))
        folder.chmod(0o755)
        canary = await stack.enter_async_context(_server(CANARY))
        gateway = await stack.enter_async_context(_server(GATEWAY))
        given = {"root": str(folder / "sandboxes"), "gateway_url": f"http://127.0.0.1:{gateway}"}
        answers = ""
        if "gateway" in can.networks:
            given["relay"] = await _relay(stack, folder / "relay", given["gateway_url"])
            answers = GATEWAY
        yield Setting(
            backend=backend,
            settings=given | dict(settings),
            image=image,
            canary=f"127.0.0.1 {canary} {CANARY}",
            gateway=answers,
        )


@asynccontextmanager
async def _server(text: str) -> AsyncIterator[int]:
    """A web server that answers everything with `text`; its port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _relay(stack: AsyncExitStack, folder: Path, gateway_url: str) -> str:
    """Start a relay that carries to `gateway_url`; its folder."""
    await stack.enter_async_context(fixed_relay(folder, [gateway_url], drain_s=0.0))
    return str(folder)
