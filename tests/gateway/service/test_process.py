"""The process around the calls: leases, metrics, the log that goes away and comes back, draining."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.gateway.service import gateway_service, serve_gateway
from rollyard.gateway.settings import GatewaySettings
from rollyard.pipeline.config import Config, GatewayConfig, NatsConfig, StoreConfig
from rollyard.pipeline.embedded import nats_server
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import SetupError
from rollyard.schemas.fleet import Lease, LlmServer

USER: dict[str, Any] = {"role": "user", "content": "hello"}


async def test_a_lease_for_each_start_that_is_renewed_and_given_back(stage: Any) -> None:
    leases: Bucket[Lease] = Bucket(stage.bus, subjects.GATEWAYS, Lease)
    async with gateway_service(stage.bus, GatewaySettings(secret=b"s", lease_s=0.3)) as gateway:
        first = await leases.get(gateway.incarnation)
        assert first is not None
        assert (first[0].owner, first[0].url) == (gateway.incarnation, gateway.url)

        async def renewed() -> bool:
            now = await leases.get(gateway.incarnation)
            return now is not None and now[0].renewal > first[0].renewal

        await stage.until(renewed)
    assert await leases.get(gateway.incarnation) is None
    async with gateway_service(stage.bus, GatewaySettings(secret=b"s")) as again:
        assert again.incarnation != gateway.incarnation


async def test_metrics_and_readiness(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    await stage.ask(gateway, [USER])
    await stage.ask(gateway, [USER], key="wrong")
    async with stage.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    assert 'rollyard_gateway_calls_total{status="ok"} 1.0' in text
    assert 'rollyard_gateway_refusals_total{code="invalid_api_key"} 1.0' in text
    assert "rollyard_gateway_ends_owed 0.0" in text
    async with stage.client.get(f"{gateway.url}/readyz") as response:
        assert "1 of 1 model servers healthy" in await response.text()


async def test_a_log_that_fails_in_mid_stream_cuts_it_and_gets_its_end_later(
    stage: Any, nats: Any, tmp_path: Path
) -> None:
    await stage.model({"content": "hello " * 10, "chunk_delay_s": 0.05})
    gateway = await stage.gateway(ack_timeout_s=0.5)
    async with stage.post(gateway, [USER], stream=True) as response:
        text = b""
        while b"ello" not in text:
            text += await response.content.readany()
        os.kill(nats.pid, signal.SIGKILL)
        await nats.process.wait()
        with pytest.raises(aiohttp.ClientPayloadError):
            async for block in response.content.iter_any():
                text += block
    assert b'finish_reason":"' not in text
    assert gateway.gateway.recorder.owed == 1
    async with nats_server(tmp_path / "nats", nats.port):
        [end] = await stage.until(stage.ends)
        assert (end.status, end.finish_reason) == ("ok", "stop")
        _, body = await stage.until(lambda: answered(stage, gateway))
        assert body["choices"][0]["message"]["content"] == end.reply["content"]
        await stage.aclose()


async def answered(stage: Any, gateway: Any) -> Any:
    status, body = await stage.ask(gateway, [USER])
    return (status, body) if status == 200 else None


async def test_calls_in_flight_finish_when_a_gateway_stops(stage: Any) -> None:
    await stage.model({"content": "hello " * 5, "chunk_delay_s": 0.05})
    async with AsyncExitStack() as stack:
        settings = GatewaySettings(secret=b"secret of this", drain_s=30)
        gateway = await stack.enter_async_context(gateway_service(stage.bus, settings))
        key = sign(SessionGrant(run="run", rollout_id="r1", attempt=1), settings.secret)
        asking = asyncio.create_task(stage.until(lambda: ok(stage, gateway, key)))
        await stage.until(stage.intents)
    assert (await asking)["choices"][0]["finish_reason"] == "stop"
    assert [end.status for end in await stage.ends()] == ["ok"]


async def ok(stage: Any, gateway: Any, key: str) -> Any:
    status, body = await stage.ask(gateway, [USER], key=key)
    return body if status == 200 else None


async def test_calls_that_take_too_long_are_aborted_when_a_gateway_stops(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 60})
    async with AsyncExitStack() as stack:
        settings = GatewaySettings(secret=b"secret of this", drain_s=0.1)
        gateway = await stack.enter_async_context(gateway_service(stage.bus, settings))
        key = sign(SessionGrant(run="run", rollout_id="r1", attempt=1), settings.secret)
        asking = asyncio.create_task(stage.until(lambda: ok(stage, gateway, key)))
        await stage.until(stage.intents)
    with pytest.raises(aiohttp.ClientError):
        await asking
    assert [end.status for end in await stage.ends()] == ["aborted"]


async def test_a_call_that_takes_too_long_ends(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 60})
    gateway = await stage.gateway(call_timeout_s=0.2)
    status, body = await stage.ask(gateway, [USER])
    assert (status, body["error"]["code"]) == (504, "call_timeout")
    [end] = await stage.until(stage.ends)
    assert end.status == "error"


async def test_a_busy_port(stage: Any) -> None:
    gateway = await stage.gateway(ready=False)
    port = int(gateway.url.rsplit(":", 1)[1])
    with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        await stage.gateway(ready=False, port=port)


async def test_servers_come_and_go(stage: Any) -> None:
    await stage.model({"content": "hello"}, name="one")
    gateway = await stage.gateway()
    assert (await stage.ask(gateway, [USER]))[0] == 200
    servers: Bucket[LlmServer] = Bucket(stage.bus, subjects.LLM_SERVERS, LlmServer)
    await servers.delete("one")

    async def refused() -> bool:
        return (await stage.ask(gateway, [USER]))[0] == 503

    await stage.until(refused)


async def test_a_new_policy_version_needs_no_new_probe(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    [entry] = gateway.gateway.pool.entries()
    server = entry.server
    await Bucket(stage.bus, subjects.LLM_SERVERS, LlmServer).put(
        "s1", LlmServer(server_id="s1", url=server.url, engine="vllm", upstream_model="scripted", policy_version=8)
    )

    async def seen() -> bool:
        return bool(entry.server.policy_version == 8)

    await stage.until(seen)
    await stage.ask(gateway, [USER])
    [end] = await stage.ends()
    assert (end.policy_version, end.policy_version_end) == (8, None)


async def test_a_process_serves_by_its_configuration_until_it_is_told_to_stop(
    bus: Any, nats: Any, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    config = Config(
        nats=NatsConfig(url=nats.url),
        gateway=GatewayConfig(port=0, secret_env="ROLLYARD_TEST_NO_SUCH_VARIABLE"),
        store=StoreConfig(data=str(tmp_path)),
    )
    stop = asyncio.Event()
    leases: Bucket[Lease] = Bucket(bus, subjects.GATEWAYS, Lease)
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_gateway(config, stop))
        while not (found := [lease async for _, lease, _ in leases.items() if lease.url]):  # noqa: ASYNC110 - in the bus
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as client, client.get(f"{found[0].url}/readyz") as response:
            assert response.status == 200
        stop.set()
    assert [key async for key, _, _ in leases.items()] == []
