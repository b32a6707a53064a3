"""Streams over a real connection: signs of life, agents that take nothing, bodies that are not what they seem."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from typing import Any

USER: dict[str, Any] = {"role": "user", "content": "hello"}


async def test_a_silent_model_is_bridged_by_signs_of_life(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 0.6})
    gateway = await stage.gateway(ping_s=0.1)
    async with stage.post(gateway, [USER], stream=True) as response:
        assert response.status == 200
        first = await response.content.readuntil(b"\n\n")
        assert first == b": ping\n\n"
        assert len(await stage.intents()) == 1
        assert await stage.ends() == []
        rest = await response.content.read()
    assert rest.count(b": ping\n\n") >= 2
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_pauses_is_kept_alive(stage: Any) -> None:
    await stage.model({"content": "hello world", "chunk_delay_s": 0.3})
    gateway = await stage.gateway(ping_s=0.1)
    async with stage.post(gateway, [USER], stream=True) as response:
        body = await response.content.read()
    assert body.startswith(b": ping") or body.startswith(b"data:")
    assert b": ping\n\ndata: " in body


async def test_an_error_after_a_sign_of_life_is_an_error_in_the_stream(stage: Any) -> None:
    await stage.model({"fail_status": 400, "fail_times": 9, "delay_s": 0.4, "content": ""})
    gateway = await stage.gateway(ping_s=0.1)
    async with stage.post(gateway, [USER], stream=True) as response:
        assert response.status == 200
        seen = b""
        try:
            while block := await response.content.readany():
                seen += block
        except Exception as error:  # noqa: BLE001 - however the client calls a cut connection
            assert type(error).__name__ in ("ClientPayloadError", "ClientConnectionError", "ServerDisconnectedError")
    assert b"refused_by_server" in seen
    assert b"[DONE]" not in seen


async def test_an_agent_that_reads_nothing_is_cut_off(stage: Any) -> None:
    await stage.model({"content": "hello world " * 20_000}, max_model_len=200_000, tokens_per_chunk=500)
    gateway = await stage.gateway(write_timeout_s=0.3)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    body = b'{"stream": true, "messages": [{"role": "user", "content": "hello"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stage.key()}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    [end] = await stage.until(stage.ends)
    assert end.status in ("aborted", "ok")

    async def gone() -> bool:
        return not gateway.gateway.in_flight

    await stage.until(gone)
    writer.close()


async def test_a_body_that_does_not_arrive_is_not_waited_for(stage: Any) -> None:
    gateway = await stage.gateway(read_timeout_s=0.2)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stage.key()}\r\n"
        "Content-Length: 100\r\n\r\n{".encode()
    )
    line = await reader.readline()
    assert b" 408 " in line
    writer.close()


async def test_compressed_bodies_are_taken_and_bombs_are_not(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway(max_body_bytes=1_000_000)
    url = f"{gateway.url}/v1/chat/completions"
    headers = {
        "Authorization": f"Bearer {stage.key()}",
        "Content-Encoding": "gzip",
        "Content-Type": "application/json",
    }
    small = gzip.compress(b'{"messages": [{"role": "user", "content": "hello"}]}')
    async with stage.client.post(url, data=small, headers=headers) as response:
        assert response.status == 200
    bomb = gzip.compress(b'{"messages": "' + b"x" * 50_000_000)
    assert len(bomb) < 100_000
    async with stage.client.post(url, data=bomb, headers=headers) as response:
        assert response.status == 413
        assert "1000000 bytes" in (await response.json())["error"]["message"]


async def test_headers_have_a_limit(stage: Any) -> None:
    gateway = await stage.gateway(max_header_bytes=8192)
    headers = {"Authorization": f"Bearer {stage.key()}", "x-large": "x" * 10_000}
    async with stage.client.post(f"{gateway.url}/v1/chat/completions", json={}, headers=headers) as response:
        assert response.status == 400


async def test_a_websocket_is_answered_by_426(stage: Any) -> None:
    gateway = await stage.gateway()
    headers = {"Authorization": f"Bearer {stage.key()}", "Connection": "Upgrade", "Upgrade": "websocket"}
    async with stage.client.get(f"{gateway.url}/v1/responses", headers=headers) as response:
        assert response.status == 426


async def test_a_connection_that_sends_no_request_is_closed(stage: Any) -> None:
    gateway = await stage.gateway(header_timeout_s=0.4)
    host, port = gateway.url.removeprefix("http://").split(":")
    silent, half = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    half[1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-half: ")
    async with stage.client.get(f"{gateway.url}/healthz") as response:
        assert response.status == 200
    for reader, writer in (silent, half):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    async with stage.client.get(f"{gateway.url}/healthz") as response:
        assert response.status == 200


async def test_a_body_that_is_no_gzip_is_an_error_of_the_agent(stage: Any) -> None:
    gateway = await stage.gateway()
    headers = {"Authorization": f"Bearer {stage.key()}", "Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with stage.client.post(f"{gateway.url}/v1/messages", data=b"abc", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")


async def test_numbers_without_end_and_lists_without_end_are_refused(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**128 - 1}}}
    for path, fields, words in (
        ("chat/completions", {"messages": [USER], "tools": [tool]}, "64 bits"),
        ("chat/completions", {"messages": [USER], "seed": 2**70}, "64 bits"),
        ("responses", {"input": "hi", "tools": [tool["function"] | {"type": "function"}]}, "64 bits"),
        ("messages", {"messages": [USER], "max_tokens": 9, "tools": [{}] * 5000}, "`tools` has 5000 items"),
        ("responses", {"input": [{}] * 60_000}, "`input` has 60000 items"),
    ):
        headers = {"Authorization": f"Bearer {stage.key()}"}
        async with stage.client.post(f"{gateway.url}/v1/{path}", json=fields, headers=headers) as response:
            assert response.status == 400, path
            assert words in str(await response.json()), path
    assert await stage.events() == []
