"""The way from a sandbox without a network to a gateway: 127.0.0.1:8400 inside, this machine's relay outside.

Where we may enter the sandbox's network (bubblewrap), a *door* is a socket that listens there and that the relay
accepts connections at: no process in the sandbox, no program in its image. Elsewhere a small *forwarder* runs inside
and carries connections to the relay's unix socket, or to the gateway's public URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from rollyard.gateway.relay.control import Request, ask
from rollyard.gateway.relay.doors import GATEWAY_PORT as RELAY_PORT
from rollyard.gateway.relay.doors import open_doors
from rollyard.gateway.relay.folder import GATEWAY_SOCKET, SHARED
from rollyard.schemas.errors import SandboxError

GATEWAY_PORT: Final = RELAY_PORT
GATEWAY_URL: Final = f"http://127.0.0.1:{GATEWAY_PORT}"
SOCKET_NAME: Final = GATEWAY_SOCKET
BATCH: Final = 64

# The interpreters that images tend to have, the better one first.
_CHOOSE: Final = """
target=$2 port=$3 needs='import selectors, socket, threading'
case $target in https:*) needs="$needs, ssl" ;; esac
for each in ${1:-python3 python perl}; do
  case $each in
    *perl*) "$each" -MErrno -MFcntl -MIO::Select -MSocket -e 1 2>/dev/null && exec "$each" -e "$5" "$target" "$port" ;;
    *) "$each" -I -S -c "$needs" 2>/dev/null && exec "$each" -I -S -c "$4" "$target" "$port" ;;
  esac
done
echo 'there is no python3 and no perl here that could carry connections to the gateway' >&2
exit 127
"""


def shared_folder(relay: Path) -> Path:
    """The folder to bind read-only into containers. It holds `gateway.sock`, now or as soon as a relay starts."""
    return relay / SHARED


async def check_relay(relay: Path) -> str:
    """The incarnation of the relay of this folder. Raises SandboxError when none answers."""
    return (await asyncio.to_thread(ask, relay, Request(do="hello"))).incarnation


async def open_door(relay: Path, holder_pid: int, key: str) -> None:
    """Let the sandbox `key` reach the gateway, whose network is that of the process `holder_pid`.

    Does nothing when that is so already. Raises SandboxError.
    """
    failed = await _open(relay, {key: holder_pid})
    if failed:
        raise failed[key]


async def close_door(relay: Path, key: str) -> None:
    """Let the sandbox reach the gateway no more; connections that it has stay.

    Does nothing when there is no door, or no relay.
    """
    try:
        await asyncio.to_thread(ask, relay, Request(do="close", key=key))
    except SandboxError:
        # No relay, no doors; and the next one looks for the holder first.
        return


class Doors:
    """The doors of one backend. They are this machine's relay's, so any worker may close what another has opened."""

    def __init__(self, relay: Path) -> None:
        self._relay = relay

    async def open(self, holder_pid: int, key: str) -> None:
        """See `open_door`."""
        await open_door(self._relay, holder_pid, key)

    async def close(self, key: str) -> None:
        """See `close_door`."""
        await close_door(self._relay, key)

    async def renew(self, holders: Mapping[str, int]) -> None:
        """Open what the relay does not have of `holders` (sandbox -> pid), which are all that live and have a network.

        To be called every few seconds. A relay that starts opens by itself what it had; this is for what it could not.
        Raises SandboxError when there is no relay, or for the first door that cannot be opened.
        """
        answer = await asyncio.to_thread(ask, self._relay, Request(do="missing", keys=tuple(holders)))
        failed: dict[str, SandboxError] = {}
        for start in range(0, len(answer.missing), BATCH):
            failed |= await _open(self._relay, {key: holders[key] for key in answer.missing[start : start + BATCH]})
        for error in failed.values():
            raise error


def forwarder_argv(target: str, interpreter: str = "") -> tuple[str, ...]:
    """A program, whole in its arguments, that listens on 127.0.0.1:8400 of a sandbox and carries connections.

    They go to `target`: the path of the relay's socket as seen inside, or http://HOST:PORT or https://HOST.
    `interpreter` is a Python or Perl of the sandbox; empty: python3, else perl, whichever is there. Raises
    SandboxError.
    """
    if not target.startswith(("/", "http://", "https://")):
        raise SandboxError(
            f"a forwarder cannot reach {target!r}", hint="give the path of a socket, or an http or https URL"
        )
    programs = (_program("forwarder.py"), _program("forwarder.pl"))
    return ("sh", "-c", _CHOOSE, "forwarder", interpreter, target, str(GATEWAY_PORT), *programs)


async def _open(relay: Path, holders: Mapping[str, int]) -> dict[str, SandboxError]:
    """Open doors; returns what failed."""
    await check_relay(relay)
    said = await open_doors(relay, holders)
    return {
        key: SandboxError(f"the sandbox {key} cannot be given a way to the gateway: {error}")
        for key, error in said.items()
        if error
    }


@cache
def _program(name: str) -> str:
    return (Path(__file__).parent / name).read_text()
