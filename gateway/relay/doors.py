"""Doors: sockets that listen inside the networks of sandboxes, and that this relay accepts connections at.

A listening socket keeps its network alive, so the relay looks itself whether the process that holds the network lives.
A relay that starts opens the doors of the one before it again: agents shall meet a closed door for a second at most.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta, Struct

from rollyard.gateway.relay import listen
from rollyard.gateway.relay.carrier import Carrier
from rollyard.gateway.relay.folder import RelayFolder, keep, kept
from rollyard.schemas.errors import SandboxError

log = structlog.get_logger(__name__)

GATEWAY_PORT: Final = 8400
"""The gateway's port on 127.0.0.1 of a sandbox."""
LOOK_S: Final = 2.0
BACKLOG: Final = 512
APPEARS_S: Final = 2.0
OPEN_TIMEOUT_S: Final = 90.0
BATCH: Final = 64


class Holder(Struct, frozen=True):
    """The process that keeps a sandbox's network, and the number of that network."""

    pid: int
    netns: int


class Said(Struct, frozen=True):
    """What listen.py says of a door."""

    key: str
    error: Annotated[str, Meta(description="empty: it is open")] = ""


class Doors:
    """The doors of one relay."""

    def __init__(self, folder: RelayFolder, carrier: Carrier) -> None:
        self._folder = folder
        self._carrier = carrier
        self._servers: dict[str, asyncio.Server] = {}
        self._holders: dict[str, Holder] = {}

    def __len__(self) -> int:
        return len(self._servers)

    def missing(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Those of `keys` that have no door."""
        return tuple(key for key in keys if key not in self._servers)

    async def open(self, key: str, holder: Holder, listener: socket.socket | None) -> None:
        """Accept at `listener`. Without one, this door must be open already. Raises SandboxError."""
        if listener is None:
            if not await self._appears(key, holder):
                raise SandboxError(
                    f"something else listens at 127.0.0.1:{GATEWAY_PORT} in the sandbox {key}",
                    hint="its setup must leave that port free: agents find the gateway there",
                )
            return
        if listener.family != socket.AF_INET or not _is_listening(listener):
            raise SandboxError(f"what came for the sandbox {key} is no listening TCP socket")
        self._close(key)
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._servers[key] = await loop.create_server(self._carrier.for_door(key), sock=listener, backlog=BACKLOG)
        self._holders[key] = holder
        self._keep()
        log.debug("door_opened", sandbox=key, holder=holder.pid)

    async def _appears(self, key: str, holder: Holder) -> bool:
        """Whether the door is open, or another process is about to hand it over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(APPEARS_S):
                while self._holders.get(key) != holder:  # noqa: ASYNC110 - it comes over the control socket
                    await asyncio.sleep(0.02)
        return self._holders.get(key) == holder

    def close(self, key: str) -> None:
        """Accept no more for this sandbox. Does nothing when there is no such door."""
        if self._close(key):
            self._carrier.choice.forget(key)
            self._keep()
            log.debug("door_closed", sandbox=key)

    def close_all(self) -> None:
        """For the end of this relay: the next one opens them again."""
        for key in list(self._servers):
            self._close(key)

    def _close(self, key: str) -> bool:
        self._holders.pop(key, None)
        server = self._servers.pop(key, None)
        if server is not None:
            server.close()
        return server is not None

    def _keep(self) -> None:
        try:
            keep(self._folder.doors, self._holders)
        except OSError as error:
            log.warning("doors_not_kept", error=str(error))

    async def run(self) -> None:
        """Open what the relay before had open, then close the doors of sandboxes that are gone, until cancelled."""
        await self._reopen()
        while True:
            await asyncio.sleep(LOOK_S)
            for key, holder in list(self._holders.items()):
                if not lives(holder):
                    self.close(key)

    async def _reopen(self) -> None:
        before: dict[str, Holder] = kept(self._folder.doors, dict[str, Holder]) or {}
        living = {key: holder.pid for key, holder in before.items() if lives(holder) and key not in self._servers}
        pairs = list(living.items())
        for start in range(0, len(pairs), BATCH):
            said = await open_doors(self._folder.root, dict(pairs[start : start + BATCH]))
            for key, error in said.items():
                if error:
                    log.warning("door_not_reopened", sandbox=key, error=error)
        if pairs:
            log.info("doors_reopened", doors=len(pairs))


async def open_doors(folder: Path, holders: Mapping[str, int]) -> dict[str, str]:
    """Listen in the networks of `holders` (sandbox -> pid) and hand the sockets to the relay of `folder`.

    Returns what went wrong, by sandbox; empty: it is open.
    """
    arguments = [part for key, pid in holders.items() for part in (str(pid), key)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", listen.__file__, str(folder), str(GATEWAY_PORT), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return dict.fromkeys(holders, f"no answer within {OPEN_TIMEOUT_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = [msgspec.json.decode(line, type=Said) for line in output.splitlines()]
    silent = errors.decode(errors="replace").strip().rpartition("\n")[2] or "it ended without a word"
    return dict.fromkeys(holders, silent) | {each.key: each.error for each in said}


def lives(holder: Holder) -> bool:
    """Whether the process is still there, in the network that it had."""
    try:
        return Path(f"/proc/{holder.pid}/ns/net").stat().st_ino == holder.netns
    except PermissionError:
        return True
    except OSError:
        return False


def _is_listening(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
