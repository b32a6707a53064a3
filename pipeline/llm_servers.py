"""The pool of model servers as it is written down: the `llm_servers` bucket, which every gateway follows."""

from __future__ import annotations

import secrets
from typing import Any

from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.gateways import Gateways, Heard
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import ConfigError, Conflict
from rollyard.schemas.fleet import LlmServer


class LlmServers:
    """Reads and changes entries of the pool."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._bucket = Bucket[LlmServer](bus, subjects.LLM_SERVERS, LlmServer)

    async def all(self) -> list[LlmServer]:
        """Every entry, by id."""
        return sorted([server async for _, server, _ in self._bucket.items()], key=lambda server: server.server_id)

    async def get(self, server_id: str) -> tuple[LlmServer, int]:
        """(entry, revision). Raises ConfigError for a server that is not in the pool."""
        found = await self._bucket.get(_key(server_id))
        if found is None:
            raise ConfigError(f"no server {server_id!r} is in the pool", hint="`rollyard llm ls` lists them")
        return found

    async def add(self, server: LlmServer) -> int:
        """Add a server, or replace its entry; one that says no policy version keeps that of the entry.

        Returns the revision. Raises ConfigError for an address that is none.
        """
        if not server.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"url {server.url!r} of server {server.server_id} is no address",
                hint="for example http://127.0.0.1:8000",
            )
        while True:
            standing = await self._bucket.get(_key(server.server_id))
            if standing is None:
                try:
                    return await self._bucket.create(_key(server.server_id), server)
                except Conflict:
                    continue
            version = standing[0].policy_version if server.policy_version is None else server.policy_version
            try:
                entry = structs.replace(server, policy_version=version)
                return await self._bucket.update(_key(server.server_id), entry, standing[1])
            except Conflict:
                continue

    async def remove(self, server_id: str) -> None:
        """Take a server out of the pool at once; calls that run there go on. Raises ConfigError."""
        await self.get(server_id)
        await self._bucket.delete(_key(server_id))

    async def change(self, server_id: str, *, held_by: str | None = None, **fields: Any) -> tuple[LlmServer, int]:
        """Change fields of an entry; returns it with its revision. Raises ConfigError.

        With `held_by` only while that weight update holds the entry: else Conflict.
        """
        while True:
            server, revision = await self.get(server_id)
            if held_by is not None and server.update != held_by:
                raise Conflict(
                    f"the entry of server {server_id} was changed by somebody else meanwhile",
                    hint="`rollyard llm ls` shows it; repeat the update if it is still wanted",
                )
            server = structs.replace(server, **fields)
            try:
                return server, await self._bucket.update(_key(server_id), server, revision)
            except Conflict:
                continue

    async def pause(self, server_id: str) -> None:
        """Send no new calls there; they go to other servers, or wait. Calls that run go on. Raises ConfigError."""
        await self.change(server_id, state="paused", note="paused by hand")

    async def resume(self, server_id: str) -> None:
        """Send calls there again. Raises ConfigError, also for a server whose weights are not known."""
        server, _ = await self.get(server_id)
        if server.state == "swapping":
            raise ConfigError(
                f"server {server_id} stopped in the middle of a weight update: {server.note}",
                hint="repeat the update (`rollyard llm update`), or add the server anew with its policy version",
            )
        await self.change(server_id, state="serving", note="", update="")

    async def drain(self, server_id: str, *, timeout_s: float, gateways: Gateways, heard: Heard | None = None) -> None:
        """Send no new calls there, and return when no call runs there at any gateway.

        Raises ConfigError, and WaitTimeout, which leaves it draining.
        """
        _, revision = await self.change(server_id, state="draining", note="drained by hand")
        await gateways.settled(server_id, revision, idle=True, timeout_s=timeout_s, heard=heard)

    async def swap(
        self, old_id: str, server: LlmServer, *, timeout_s: float, gateways: Gateways, heard: Heard | None = None
    ) -> None:
        """Put a new server in the place of another, for servers that cannot load other weights in place.

        It serves once every gateway finds it healthy; then the old one is drained and removed. Raises ConfigError when
        there is nothing to replace or the new id is taken, and WaitTimeout: of a new server that is not healthy nothing
        is left, an old one that is not idle stays draining.
        """
        await self.get(old_id)
        update = secrets.token_hex(6)
        waits = structs.replace(server, state="swapping", update=update, note=f"is to replace {old_id}")
        try:
            revision = await self._bucket.create(_key(server.server_id), waits)
        except Conflict:
            raise ConfigError(
                f"server {server.server_id!r} is in the pool already", hint="give the new server another id"
            ) from None
        try:
            await gateways.settled(server.server_id, revision, healthy=True, timeout_s=timeout_s, heard=heard)
            await self.change(server.server_id, held_by=update, state="serving", update="", note="")
        except BaseException:
            await self._bucket.delete(_key(server.server_id))
            raise
        _, revision = await self.change(old_id, state="draining", note=f"replaced by {server.server_id}")
        await gateways.settled(old_id, revision, idle=True, timeout_s=timeout_s, heard=heard)
        await self._bucket.delete(_key(old_id))


def _key(server_id: str) -> str:
    try:
        return subjects.token(server_id)
    except ValueError as error:
        raise ConfigError(f"id of a model server: {error}", hint="`rollyard llm ls` lists them") from None
