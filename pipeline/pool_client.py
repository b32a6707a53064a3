"""The part of the trainer client that deals with model servers: who is in the pool, and which weights they serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.gateways import Gateways
from rollyard.pipeline.llm_servers import LlmServers
from rollyard.pipeline.weights import Told, request_update
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.weights import How, WeightReport, WeightUpdate

TIMEOUT_S = 600.0


class PoolClient:
    """Model servers, for `Client`. All methods raise BusError, and ConfigError for a server that is not in the pool."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def servers(self) -> list[LlmServer]:
        """Every model server of the pool."""
        return await LlmServers(self.bus).all()

    async def add_server(self, server: LlmServer | None = None, **fields: Any) -> None:
        """Add a server, or replace its entry: an LlmServer, or its fields. Gateways send calls once it answers."""
        if (server is None) == (not fields):
            raise ConfigError("add_server takes an LlmServer or its fields", hint="server_id=..., url=..., engine=...")
        await LlmServers(self.bus).add(server or make_server(**fields))

    async def remove_server(self, server_id: str) -> None:
        """Take a server out of the pool. Calls that run there go on; to wait for them, `drain_server` first."""
        await LlmServers(self.bus).remove(server_id)

    async def pause_server(self, server_id: str) -> None:
        """Send no new calls to a server: they go to other servers of its model, or wait."""
        await LlmServers(self.bus).pause(server_id)

    async def drain_server(self, server_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """The same, and return when no call runs there any more. Raises WaitTimeout, which leaves it draining."""
        async with Gateways.following(self.bus) as gateways:
            await LlmServers(self.bus).drain(server_id, timeout_s=timeout_s, gateways=gateways)

    async def resume_server(self, server_id: str) -> None:
        """Send calls to a server again."""
        await LlmServers(self.bus).resume(server_id)

    async def swap_server(self, old_id: str, server: LlmServer, *, timeout_s: float = TIMEOUT_S) -> None:
        """Put a new server in the place of another: when it answers, the old one is drained and removed."""
        async with Gateways.following(self.bus) as gateways:
            await LlmServers(self.bus).swap(old_id, server, timeout_s=timeout_s, gateways=gateways)

    async def set_server_version(self, server_id: str, version: int) -> None:
        """Say which weights a server serves from now on: tokens bear this version. It itself is not asked."""
        await LlmServers(self.bus).change(server_id, policy_version=check_version(version))

    async def update_weights(
        self,
        version: int,
        *,
        checkpoint: str | None = None,
        how: How = "drain",
        servers: Iterable[str] = (),
        model: str = "default",
        rolling: bool = True,
        timeout_s: float = TIMEOUT_S,
        told: Told | None = None,
    ) -> WeightReport:
        """Have servers serve other weights; returns when each of them does, or has failed to: see `report.failed`.

        `checkpoint` is a path that the servers read; without one they have the weights already. `how`: "drain" lets
        calls end first, "pause" has the server finish them while new ones wait, "abort" cuts them short and goes on
        with them on the new weights. `servers` are ids, else all servers of `model`; one after the other, or
        (`rolling=False`) all at once. `told` hears of every step.

        The same update may be repeated at any time: servers that have it are left alone, others are mended. Raises
        BusError when no gateway could carry it out to the end.
        """
        update = WeightUpdate(
            update_id=uuid4().hex,
            version=check_version(version),
            checkpoint=checkpoint,
            how=how,
            servers=tuple(servers),
            model=model,
            rolling=rolling,
            timeout_s=timeout_s,
        )
        return await request_update(self.bus, update, told)


def make_server(**fields: Any) -> LlmServer:
    """An LlmServer of these fields. Raises ConfigError for one that does not fit."""
    unknown = fields.keys() - set(LlmServer.__struct_fields__)
    if unknown:
        raise ConfigError(f"a model server has no {', '.join(sorted(unknown))}", hint="see `rollyard schema LlmServer`")
    try:
        return msgspec.convert(fields, LlmServer)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no model server: {error}", hint="see `rollyard schema LlmServer`") from None


def check_version(version: int) -> int:
    """`version` itself. Raises ConfigError when it is no policy version."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**31:
        raise ConfigError(f"a policy version is an integer from 0 to 2^31-1, not {version!r}", hint="count updates")
    return version
