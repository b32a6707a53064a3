"""Starting the forwarder in a sandbox: the process that carries 127.0.0.1:8400 inside to the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.door import GATEWAY_PORT
from rollyard.stages.sandboxes.inside import InsideSandbox

FORWARDER: Final = "rollyard-gateway"
WAIT_S: Final = 20.0

# Looks in the kernel's table, since an image may have no program that could try to connect.
_LISTENS: Final = f"""
i=0
while [ "$i" -lt 150 ]; do
  while read -r number local remote state rest; do
    case "$local $state" in *:{GATEWAY_PORT:04X}" 0A") exit 0 ;; esac
  done </proc/net/tcp
  i=$((i + 1))
  sleep 0.1
done
exit 1
"""


async def start_forwarder(
    sandbox: InsideSandbox, argv: Sequence[str], *, name: str = FORWARDER, deadline_s: float
) -> None:
    """Start it as the process `name` of the sandbox, once, and wait until it listens. Raises SandboxError."""
    await sandbox.start(name, Command(tuple(argv)), deadline_s=deadline_s)
    listens = await sandbox.exec(_LISTENS, timeout_s=WAIT_S)
    if listens.exit_code != 0:
        _, said = await sandbox.output(name, 500)
        raise SandboxError(
            "the way to the gateway could not be opened in the sandbox: "
            + (said.decode(errors="replace").strip() or "its forwarder does not listen"),
            hint="the image needs python3 or perl",
        )
