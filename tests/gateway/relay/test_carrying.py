"""What a relay does with connections, through its unix socket, in front of real servers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web
from relays import client, dialled, make_certificate, named, needs, relay_to, tcp_server, web_server

from rollyard.gateway.relay import carrier

MIB = 1 << 20


async def test_a_request_reaches_the_gateway(folder: Path) -> None:
    async with web_server(named("a")) as url, relay_to(folder, url) as relay, client(folder) as http:
        for number in range(3):
            async with http.post(f"/v1/{number}", data=b"x" * number) as reply:
                assert await reply.json() == {"by": "a", "path": f"/v1/{number}", "got": number}
        assert relay.carrier.carried == 1, "one connection is kept alive"


async def test_bytes_pass_as_they_are_both_ways(folder: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()

    sent = os.urandom(3 * MIB)
    async with tcp_server(echo) as url, relay_to(folder, url), dialled(folder) as (reader, writer):

        async def send() -> None:
            writer.write(sent)
            await writer.drain()
            writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            got = group.create_task(reader.read())
        assert got.result() == sent


async def test_an_end_of_one_direction_leaves_the_other_open(folder: Path) -> None:
    async def answer_after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read()
        writer.write(b"you said " + asked)
        await writer.drain()

    async with (
        tcp_server(answer_after_the_end) as url,
        relay_to(folder, url) as relay,
        dialled(folder) as (reader, writer),
    ):
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"you said hello"
        await until_none(relay.carrier)


@pytest.mark.parametrize("said", [b"early", b""])
async def test_an_end_that_comes_before_the_gateway_is_reached_is_passed_on(folder: Path, said: bytes) -> None:
    """The agent says all it has, and ends, while the gateway is still away."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    async with relay_to(folder, f"http://127.0.0.1:{port}", patience_s=5.0), dialled(folder) as (reader, writer):
        writer.write(said)
        writer.write_eof()
        await asyncio.sleep(0.3)

        async def answer_after_the_end(there: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
            back.write(b"you said " + await there.read())
            back.close()

        async with await asyncio.start_server(answer_after_the_end, "127.0.0.1", port):
            assert await reader.read() == b"you said " + said


async def test_parts_of_a_stream_are_not_held_back(folder: Path) -> None:
    turn = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(5):
            await response.write(f"data: {number}\n\n".encode())
            # Goes on only when the reader has this part.
            await turn.wait()
            turn.clear()
        return response

    app = web.Application()
    app.router.add_get("/stream", stream)
    async with web_server(app) as url, relay_to(folder, url), client(folder) as http, http.get("/stream") as reply:
        for number in range(5):
            assert await reply.content.readuntil(b"\n\n") == f"data: {number}\n\n".encode()
            turn.set()


async def test_a_huge_body_arrives_whole_and_is_not_kept_in_memory(folder: Path) -> None:
    size, seen = 32 * MIB, hashlib.sha256()
    most = 0

    async def swallow(request: web.Request) -> web.Response:
        async for part in request.content.iter_chunked(256 * 1024):
            seen.update(part)
            await asyncio.sleep(0)
        return web.Response(text=seen.hexdigest())

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/big", swallow)
    part = os.urandom(MIB)

    async def parts() -> object:
        nonlocal most
        for _ in range(size // MIB):
            yield part
            for each in relay.carrier.connections:
                if each.gateway is not None and each.gateway.transport is not None:
                    most = max(most, each.gateway.transport.get_write_buffer_size())

    async with (
        web_server(app) as url,
        relay_to(folder, url) as relay,
        client(folder) as http,
        http.post("/big", data=parts()) as reply,
    ):
        assert await reply.text() == hashlib.sha256(part * (size // MIB)).hexdigest()
    assert most < 2 * MIB


async def test_a_slow_reader_slows_the_writer_down(folder: Path) -> None:
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()
            written += 65_536

    async with tcp_server(flood) as url, relay_to(folder, url), dialled(folder) as (reader, _writer):
        await asyncio.sleep(0.3)
        before = written
        await asyncio.sleep(0.3)
        assert written == before, "nobody reads, so nobody may write for ever"
        assert before < 32 * MIB
        await reader.readexactly(before)
        assert written > before


async def test_many_streams_at_a_time(folder: Path) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(5):
            await response.write(f"{request.match_info['who']}:{number} ".encode())
            await asyncio.sleep(0.02)
        return response

    app = web.Application()
    app.router.add_get("/{who}", stream)

    async def one(http: aiohttp.ClientSession, who: int) -> None:
        async with http.get(f"/{who}") as reply:
            assert await reply.text() == "".join(f"{who}:{number} " for number in range(5))

    async with web_server(app) as url, relay_to(folder, url) as relay, client(folder) as http:
        async with asyncio.TaskGroup() as group:
            for who in range(200):
                group.create_task(one(http, who))
        assert relay.carrier.carried >= 100


async def test_a_gateway_that_refuses_is_passed_over(folder: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with web_server(named("b")) as url, relay_to(folder, dead, url):
            for _ in range(8):
                async with client(folder) as http, http.get("/") as reply:
                    assert (await reply.json())["by"] == "b"


async def test_a_gateway_that_dies_in_mid_stream_breaks_the_connection_and_the_next_one_serves(folder: Path) -> None:
    begun = asyncio.Event()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        begun.set()
        await asyncio.sleep(30)

    async with web_server(named("b")) as other, client(folder) as http:
        async with tcp_server(half) as dying:
            stack = relay_to(folder, dying)
            relay = await stack.__aenter__()
            reply = await http.get("/")
            await begun.wait()
            relay.carrier.gateways._urls = (other,)
        with pytest.raises(aiohttp.ClientError):
            await reply.read()
        async with http.get("/") as reply:
            assert (await reply.json())["by"] == "b"
        await stack.__aexit__(None, None, None)


async def test_a_reply_without_a_length_that_breaks_is_no_whole_reply(folder: Path) -> None:
    """Such a reply ends with its connection, so only a reset tells that it broke."""

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf")
        await writer.drain()
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    lost = asyncio.get_running_loop().create_future()

    class Agent(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            lost.set_result(exc)

        def eof_received(self) -> bool:
            lost.set_result("a clean end")
            return False

    async with tcp_server(broken) as url, relay_to(folder, url) as relay:
        server = await asyncio.get_running_loop().create_server(relay.carrier.for_door("k"), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            transport, _ = await asyncio.get_running_loop().create_connection(Agent, "127.0.0.1", port)
            transport.write(b"x")
            assert isinstance(await lost, ConnectionResetError)


async def test_an_agent_that_leaves_is_noticed_by_the_gateway(folder: Path) -> None:
    left = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await reader.read()
        left.set()

    async with tcp_server(wait) as url, relay_to(folder, url) as relay:
        async with dialled(folder) as (_, writer):
            writer.write(b"x")
            await writer.drain()
            await until(lambda: relay.carrier.carried == 1)
        await left.wait()
        await until_none(relay.carrier)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/chat/completions", 503, "server_error"),
        ("/v1/responses", 503, "server_error"),
        ("/v1/messages", 529, "overloaded_error"),
        ("/s/key/v1/messages", 529, "overloaded_error"),
    ],
)
async def test_without_a_gateway_the_agent_is_told_in_its_own_words(
    folder: Path, path: str, status: int, kind: str
) -> None:
    async with relay_to(folder, patience_s=0.1) as relay, client(folder) as http:
        async with http.post(path, data=io.BytesIO(b"x" * 3 * MIB)) as reply:
            assert reply.status == status
            assert int(reply.headers["Retry-After"]) >= 1
            assert (await reply.json())["error"]["type"] == kind
        assert relay.carrier.turned_away == 1


async def test_a_gateway_whose_url_has_a_path_is_named_to_the_agent(folder: Path) -> None:
    async with (
        relay_to(folder, "http://127.0.0.1:1/prefix", patience_s=0.1),
        client(folder) as http,
        http.get("/v1/models") as reply,
    ):
        assert reply.status == 503
        assert "/prefix" in (await reply.json())["error"]["message"]


async def test_a_connection_waits_for_a_gateway_that_starts_again(folder: Path) -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    async with relay_to(folder, f"http://127.0.0.1:{port}", patience_s=10.0), client(folder) as http:
        asking = asyncio.create_task(http.get("/late"))
        await asyncio.sleep(0.5)
        runner = web.AppRunner(named("late"))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with await asking as reply:
            assert (await reply.json())["by"] == "late"
        await runner.cleanup()


async def test_a_sandbox_stays_at_its_gateway_and_sandboxes_are_spread(folder: Path) -> None:
    async with web_server(named("a")) as a, web_server(named("b")) as b, relay_to(folder, a, b) as relay:
        by: dict[str, set[str]] = {}
        for key in [f"s{number}" for number in range(8)]:
            server = await asyncio.get_running_loop().create_server(relay.carrier.for_door(key), "127.0.0.1", 0)
            async with server, aiohttp.ClientSession() as http:
                for _ in range(3):
                    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
                    async with http.get(url, headers={"Connection": "close"}) as reply:
                        by.setdefault(key, set()).add((await reply.json())["by"])
        assert all(len(names) == 1 for names in by.values()), by
        assert {name for names in by.values() for name in names} == {"a", "b"}


async def test_one_sandbox_may_not_take_all_connections(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MAX_PER_SANDBOX", 5)
    async with web_server(named("a")) as url, relay_to(folder, url) as relay:
        server = await asyncio.get_running_loop().create_server(relay.carrier.for_door("greedy"), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(ConnectionError):
                await reader.readexactly(1)
            async with client(folder) as http, http.get("/") as reply:
                assert reply.status == 200
            for _, writer in opened:
                writer.transport.abort()


async def test_a_gateway_with_an_ipv6_address(folder: Path) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    async with (
        web_server(named("six"), host="::1") as url,
        relay_to(folder, url),
        client(folder) as http,
        http.get("/") as reply,
    ):
        assert (await reply.json())["by"] == "six"


async def test_a_gateway_behind_https(folder: Path, tmp_path: Path) -> None:
    needs("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    runner = web.AppRunner(named("tls"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=serving).start()
    url = f"https://localhost:{runner.addresses[0][1]}"
    try:
        async with relay_to(folder, url) as relay:
            async with client(folder) as http, http.get("/") as reply:
                assert reply.status == 503, "nobody vouches for that certificate"
            relay.carrier.gateways.tls = ssl.create_default_context(cafile=str(certificate))
            async with client(folder) as http, http.post("/x", data=io.BytesIO(b"x" * 3 * MIB)) as reply:
                assert await reply.json() == {"by": "tls", "path": "/x", "got": 3 * MIB}
            await until_none(relay.carrier)
    finally:
        await runner.cleanup()


async def test_at_the_end_an_answer_that_is_waited_for_still_comes(folder: Path) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        asked.set()
        await go_on.wait()
        return web.Response(text="at last")

    app = web.Application()
    app.router.add_get("/", slow)
    async with web_server(app) as url, client(folder) as http:
        stack = relay_to(folder, url)
        relay = await stack.__aenter__()
        waiting = asyncio.create_task(http.get("/"))
        await asked.wait()
        ending = asyncio.create_task(relay.carrier.drain(10.0))
        await asyncio.sleep(0.2)
        assert not ending.done()
        go_on.set()
        async with await waiting as reply:
            assert await reply.text() == "at last"
        began = time.monotonic()
        await ending
        assert time.monotonic() - began < 8.0, "an idle connection is not waited for"
        await stack.__aexit__(None, None, None)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - it changes by what other tasks do
        await asyncio.sleep(0.01)


async def until_none(of: carrier.Carrier) -> None:
    await until(lambda: not of.connections)


@pytest.mark.parametrize(
    "test",
    [
        test_a_request_reaches_the_gateway,
        test_bytes_pass_as_they_are_both_ways,
        test_an_end_of_one_direction_leaves_the_other_open,
        test_parts_of_a_stream_are_not_held_back,
        test_a_huge_body_arrives_whole_and_is_not_kept_in_memory,
        test_a_slow_reader_slows_the_writer_down,
        test_many_streams_at_a_time,
        test_a_gateway_that_dies_in_mid_stream_breaks_the_connection_and_the_next_one_serves,
        test_a_reply_without_a_length_that_breaks_is_no_whole_reply,
        test_an_agent_that_leaves_is_noticed_by_the_gateway,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_on_the_loop_of_relay_processes(test: Callable[[Path], Coroutine[None, None, None]], folder: Path) -> None:
    """uvloop differs from asyncio's own loop in when it begins to read, and in what it says of a broken connection."""
    uvloop.run(test(folder))
