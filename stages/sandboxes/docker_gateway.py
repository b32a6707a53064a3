"""The way from a container to the gateway: a forwarder in it, from 127.0.0.1 to the relay's socket in a folder."""

from __future__ import annotations

import asyncio
from typing import Final

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.docker_container import RELAY
from rollyard.stages.sandboxes.door import GATEWAY_PORT, GATEWAY_URL, SOCKET_NAME, forwarder_argv
from rollyard.stages.sandboxes.inside import InsideSandbox

NAME: Final = "rollyard-gateway"
FOR_S: Final = 400 * 86_400.0  # longer than any sandbox
WAIT_S: Final = 20.0
MAX_STARTS: Final = 64

_LISTENS: Final = f"""
ry_count=0
while [ "$ry_count" -lt 150 ]; do
  while read -r ry_a ry_local ry_remote ry_state ry_rest; do
    case "$ry_local $ry_state" in *:{GATEWAY_PORT:04X}" 0A") exit 0 ;; esac
  done </proc/net/tcp
  ry_count=$((ry_count + 1))
  sleep 0.1
done
exit 1
"""


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
            await self._start(f"{NAME}-{number + 1}")

    async def _newest(self) -> tuple[int, bool]:
        """The number of the last forwarder that was started, 0 for none, and whether it runs."""
        said = await self._keeper.run_inside(
            f'ry_count=0; while [ -e "$ry_control/{NAME}-$((ry_count + 1))/started" ]; do ry_count=$((ry_count + 1)); '
            f'done; echo "$ry_count"; ry_report "{NAME}-$ry_count"'
        )
        number, state, *_ = said.split()
        return int(number), state == "running"

    async def _start(self, name: str) -> None:
        argv = forwarder_argv(f"{RELAY}/{SOCKET_NAME}")
        await self._keeper.start(name, Command(tuple(argv)), deadline_s=FOR_S)
        listens = await self._keeper.exec(_LISTENS, timeout_s=WAIT_S)
        if listens.exit_code != 0:
            _, said = await self._keeper.output(name, 500)
            raise SandboxError(
                "the way to the gateway could not be opened in the sandbox: "
                + (said.decode(errors="replace").strip() or "its forwarder does not listen"),
                hint="the image needs python3 or perl",
            )
