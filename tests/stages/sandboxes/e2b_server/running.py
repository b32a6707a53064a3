"""The server as a process of its own, for tests: `async with RunningServer.started() as server`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from rollyard.stages.conformance.bench import Setting

KEY: Final = "e2b_of_the_tests"
KEY_ENV: Final = "ROLLYARD_TEST_E2B_KEY"
START_S: Final = 30.0
GATEWAY_HOST: Final = "127.66.0.1"
_PACKAGES: Final = str(Path(__file__).parent.parent)


def missing() -> str:
    """What the server needs and this machine lacks; empty: nothing."""
    lacks = [name for name in ("bwrap", "nsenter", "tar") if not shutil.which(name)]
    return f"the E2B server of the tests needs {', '.join(lacks)}" if lacks else ""


@dataclass
class RunningServer:
    """One server process on 127.0.0.1."""

    process: asyncio.subprocess.Process
    url: str

    @classmethod
    @asynccontextmanager
    async def started(cls, *options: str) -> AsyncIterator[RunningServer]:
        """A server with options of its command line. Its jails end with it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "e2b_server", "--key", KEY, *options),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _PACKAGES},
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                port = json.loads(await process.stdout.readline())["port"]
            yield cls(process, f"http://127.0.0.1:{port}")
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    def settings(self, root: Path, **more: Any) -> dict[str, Any]:
        """Settings of the backend `e2b` for this server; the key must be in the environment variable KEY_ENV."""
        here = {"api_url": self.url, "sandbox_url": self.url, "api_key_env": KEY_ENV, "root": str(root)}
        return here | more

    async def ask(self, what: str, **body: Any) -> dict[str, Any]:
        """One of the requests that only tests make: refuse, kill, state."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/_test/{what}", json=body) as reply:
            answer: dict[str, Any] = await reply.json()
            return answer

    async def refuse(self, method: str, path: str, status: int, times: int, **more: Any) -> None:
        """Answer so many matching requests of the API with this status. `after`: once the work was done."""
        await self.ask("refuse", method=method, path=path, status=status, times=times, **more)

    async def state(self) -> Mapping[str, Any]:
        """What the server saw and has."""
        return await self.ask("state")

    async def internet(self, inside: str, real: str) -> None:
        """Let sandboxes that are made from now on find the server `real` (HOST:PORT) at the address `inside`."""
        await self.ask("internet", inside=inside, real=real)

    async def reach(self, setting: Setting) -> Setting:
        """Put the counterparts of the conformance kit where sandboxes find them: the gateway at an address of its own,
        as E2B's firewall tells hosts on unusual ports apart by address only."""
        host, port, _ = setting.canary.split()
        await self.internet(f"{host}:{port}", f"{host}:{port}")
        gateway = str(setting.settings["gateway_url"]).removeprefix("http://")
        inside = f"{GATEWAY_HOST}:{gateway.rpartition(':')[2]}"
        await self.internet(inside, gateway)
        return replace(setting, settings={**setting.settings, "gateway_url": f"http://{inside}"})

    async def die(self) -> None:
        """Kill it at once."""
        self.process.kill()
        await self.process.wait()
