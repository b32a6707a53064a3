"""How a relay follows the gateways on a real bus: they come, go, and the bus itself goes away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relays import client, named, web_server

from rollyard.gateway.lease import GatewayLease
from rollyard.gateway.relay.service import Relay, relay_service
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.streams import Limits


@asynccontextmanager
async def relay_on(folder: Path, url: str) -> AsyncIterator[Relay]:
    async with relay_service(folder, url, Limits(), drain_s=0.2, patience_s=1.0) as relay:
        yield relay


async def urls(relay: Relay, *expected: str) -> None:
    """Wait until the relay knows exactly these gateways; the test's timeout ends the wait."""
    while sorted(each.url for each in relay.carrier.gateways.addresses()) != sorted(expected):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_gateways_come_and_go(nats: EmbeddedNats, bus: Bus, folder: Path) -> None:
    a, b = GatewayLease(bus, "a", 30.0), GatewayLease(bus, "b", 30.0)
    await a.renew("http://a:1")
    async with relay_on(folder, nats.url) as relay:
        await urls(relay, "http://a:1")
        await b.renew("")  # it does not listen yet
        await b.renew("http://b:2")
        await urls(relay, "http://a:1", "http://b:2")
        await a.release()
        await urls(relay, "http://b:2")
        await b.release()
        await urls(relay)


async def test_a_gateway_that_does_not_renew_its_lease_is_dead(nats: EmbeddedNats, bus: Bus, folder: Path) -> None:
    await GatewayLease(bus, "a", 0.5).renew("http://a:1")
    await GatewayLease(bus, "b", 30.0).renew("http://b:2")
    async with relay_on(folder, nats.url) as relay:
        await urls(relay, "http://a:1", "http://b:2")
        await urls(relay, "http://b:2")


async def test_when_all_are_silent_at_once_each_is_still_tried(nats: EmbeddedNats, bus: Bus, folder: Path) -> None:
    async with web_server(named("a")) as url:
        lease = GatewayLease(bus, "a", 0.5)
        await lease.renew(url)
        async with relay_on(folder, nats.url) as relay:
            await urls(relay, url)
            await asyncio.sleep(1.5)
            async with client(folder) as http, http.get("/") as reply:
                assert (await reply.json())["by"] == "a"
            await lease.release()
            await urls(relay)


async def test_several_gateways_behind_one_address_are_one(nats: EmbeddedNats, bus: Bus, folder: Path) -> None:
    for name in "ab":
        await GatewayLease(bus, name, 30.0).renew("http://balancer")
    async with relay_on(folder, nats.url) as relay:
        await urls(relay, "http://balancer")


async def test_while_the_bus_is_away_the_gateways_known_last_go_on_serving(
    nats: EmbeddedNats, bus: Bus, folder: Path
) -> None:
    async with web_server(named("a")) as url:
        await GatewayLease(bus, "a", 0.5).renew(url)
        async with relay_on(folder, nats.url) as relay:
            await urls(relay, url)
            os.kill(nats.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(4.0)  # far longer than the lease
                async with client(folder) as http, http.get("/") as reply:
                    assert (await reply.json())["by"] == "a"
            finally:
                os.kill(nats.pid, signal.SIGCONT)


async def test_a_relay_that_starts_without_a_bus_uses_the_gateways_known_last(
    nats: EmbeddedNats, bus: Bus, folder: Path
) -> None:
    async with web_server(named("a")) as url:
        await GatewayLease(bus, "a", 30.0).renew(url)
        async with relay_on(folder, nats.url) as relay:
            await urls(relay, url)
        async with relay_on(folder, "nats://127.0.0.1:1"), client(folder) as http, http.get("/") as reply:
            assert (await reply.json())["by"] == "a"


async def test_a_bus_that_comes_later_is_found(nats: EmbeddedNats, bus: Bus, folder: Path, tmp_path: Path) -> None:
    await GatewayLease(bus, "a", 30.0).renew("http://a:1")
    async with relay_on(folder, nats.url) as relay:
        # The connection is closed for good, as nats-server does to one that breaks its rules.
        await urls(relay, "http://a:1")
        view = relay.carrier.gateways._view
        assert view is not None
        await view._bus.client.close()
        while relay.carrier.gateways._view in (None, view):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await GatewayLease(bus, "b", 30.0).renew("http://b:2")
        await urls(relay, "http://a:1", "http://b:2")
