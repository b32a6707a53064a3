"""The way from a container to the gateway: a forwarder in it, from 127.0.0.1 to the relay's socket in a folder."""

from __future__ import annotations

import asyncio
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.docker_container import RELAY
from rollyard.stages.sandboxes.door import GATEWAY_URL, SOCKET_NAME, forwarder_argv
from rollyard.stages.sandboxes.forwarding import FORWARDER, start_forwarder
from rollyard.stages.sandboxes.inside import InsideSandbox

FOR_S: Final = 400 * 86_400.0  # longer than any sandbox
MAX_STARTS: Final = 64


class DockerGateway:
    """The forwarder of one sandbox. It runs as root, so that no agent of another user can end it; where one was ended,
    the next `keep_open` starts another."""

    def __init__(self, keeper: InsideSandbox) -> None:
        self._keeper = keeper
        self._lock = asyncio.Lock()
        self.url = GATEWAY_URL

    async def keep_open(self) -> None:
        """Start it unless it runs. Raises SandboxError when the image has no program for it."""
        async with self._lock:
            number, running = await self._newest()
            if running:
                return
            if number >= MAX_STARTS:
                raise SandboxError(f"the way to the gateway was closed {number} times from inside the sandbox")
            await self._start(f"{FORWARDER}-{number + 1}")

    async def _newest(self) -> tuple[int, bool]:
        """The number of the last forwarder that was started, 0 for none, and whether it runs."""
        said = await self._keeper.run_inside(
            f'ry_count=0; while [ -e "$ry_control/{FORWARDER}-$((ry_count + 1))/started" ]; do '
            f'ry_count=$((ry_count + 1)); done; echo "$ry_count"; ry_report "{FORWARDER}-$ry_count"'
        )
        number, state, *_ = said.split()
        return int(number), state == "running"

    async def _start(self, name: str) -> None:
        argv = forwarder_argv(f"{RELAY}/{SOCKET_NAME}")
        await start_forwarder(self._keeper, argv, name=name, deadline_s=FOR_S)
