"""What the relay costs beside a direct connection: latency, throughput, delay of stream chunks, memory a connection.

Server, relay and forwarder are processes of their own; the client is this one. Rounds are interleaved; medians and
ratios to the direct connection are printed.

    python tests/bench/bench_relay.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop
from measure import cpu_s, rss_mib, table

from rollyard.gateway.relay.control import Request, ask
from rollyard.pipeline.embedded import free_port
from rollyard.stages.sandboxes import door
from rollyard.stages.sandboxes.door import forwarder_argv

MIB = 1 << 20
SERVER = """
import asyncio, sys, time, uvloop
PART = b"x" * 65536
class Server(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        if data[:1] == b"d":
            asyncio.ensure_future(self.download(int(data[1:])))
        elif data[:1] == b"s":
            asyncio.ensure_future(self.stream(int(data[1:])))
        else:
            self.transport.write(data)
    async def download(self, size):
        for _ in range(size // len(PART)):
            self.transport.write(PART)
            while self.transport.get_write_buffer_size() > 1 << 20:
                await asyncio.sleep(0)
    async def stream(self, count):
        for _ in range(count):
            self.transport.write(b"%020d\\n" % time.monotonic_ns())
            await asyncio.sleep(0.002)
async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()
uvloop.run(main())
"""
RELAY = """
import asyncio, sys, uvloop
from pathlib import Path
from rollyard.gateway.relay import carrier
from rollyard.gateway.relay.service import fixed_relay
carrier.MAX_PER_SANDBOX = 100_000
async def main():
    async with fixed_relay(Path(sys.argv[1]), [sys.argv[2]]):
        print("ready", flush=True)
        await asyncio.sleep(3600)
uvloop.run(main())
"""
Dial = Callable[[], Coroutine[None, None, tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    while (line := await process.stdout.readline()).strip() not in (b"ready", b"listening"):
        assert line, "it ended"
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def echoes(dial: Dial, count: int) -> float:
    """Median ms of a small request on a connection that is kept."""
    reader, writer = await dial()
    took = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(b"e" * 1000)
        await reader.readexactly(1000)
        took.append(time.perf_counter() - began)
    writer.close()
    return statistics.median(took) * 1000


async def connections(dial: Dial, count: int) -> float:
    """Median ms of a connection with one small request."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        reader, writer = await dial()
        writer.write(b"e" * 1000)
        await reader.readexactly(1000)
        took.append(time.perf_counter() - began)
        writer.close()
    return statistics.median(took) * 1000


async def download(dial: Dial, size: int) -> float:
    """MiB a second of one connection."""
    reader, writer = await dial()
    began = time.perf_counter()
    writer.write(b"d%d" % size)
    left = size
    while left:
        left -= len(await reader.read(1 << 18))
    writer.close()
    return size / MIB / (time.perf_counter() - began)


async def chunks(dial: Dial, count: int, streams: int) -> float:
    """Median ms from the write of a chunk to its arrival, over many streams at a time."""
    late: list[int] = []

    async def one() -> None:
        reader, writer = await dial()
        writer.write(b"s%d" % count)
        for _ in range(count):
            line = await reader.readexactly(21)
            late.append(time.monotonic_ns() - int(line))
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one())
    return statistics.median(late) / 1e6


async def memory(dial: Dial, process: Process, count: int) -> float:
    """KB of the relay for a connection that is open and has said something."""
    before = rss_mib(process.pid)
    opened = []
    for _ in range(count):
        reader, writer = await dial()
        writer.write(b"e" * 1000)
        await reader.readexactly(1000)
        opened.append(writer)
    after = rss_mib(process.pid)
    for writer in opened:
        writer.close()
    return (after - before) * 1024 / count


async def main(quick: bool) -> None:
    rounds, few = (1, 200) if quick else (5, 1000)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "relay"
        port, inside = free_port(), free_port()
        await stack.enter_async_context(running(sys.executable, "-c", SERVER, str(port)))
        relay = await stack.enter_async_context(
            running(sys.executable, "-c", RELAY, str(folder), f"http://127.0.0.1:{port}")
        )
        door.GATEWAY_PORT = inside  # type: ignore[misc]
        socket = str(folder / "shared/gateway.sock")
        await stack.enter_async_context(running(*forwarder_argv(socket, sys.executable)))
        ways: dict[str, Dial] = {
            "direct": lambda: asyncio.open_connection("127.0.0.1", port),
            "relay": lambda: asyncio.open_unix_connection(socket),
            "forwarder and relay": lambda: asyncio.open_connection("127.0.0.1", inside),
        }
        measures: dict[str, Callable[[Dial], Coroutine[None, None, float]]] = {
            "1 KB request, ms": lambda dial: echoes(dial, few),
            "connection with a request, ms": lambda dial: connections(dial, few // 4),
            "one download, MiB/s": lambda dial: download(dial, (64 if quick else 512) * MIB),
            "chunk of 100 streams, ms": lambda dial: chunks(dial, 100, 100),
        }
        got: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(rounds):
            for what, measure in measures.items():
                for way, dial in ways.items():
                    got[what, way].append(await measure(dial))
        median = {key: statistics.median(values) for key, values in got.items()}
        rows = [
            [what, *(f"{median[what, way]:.3g} ({median[what, way] / median[what, 'direct']:.2f}x)" for way in ways)]
            for what in measures
        ]
        print(table(["", *ways], rows))
        count = 500 if quick else 2000
        spent = cpu_s(relay.pid)
        print(f"\nmemory of the relay: {rss_mib(relay.pid):.0f} MiB, ", end="")
        print(f"{await memory(ways['relay'], relay, count):.1f} KB for each of {count} open connections, ", end="")
        print(f"{(cpu_s(relay.pid) - spent) / count * 1e6:.0f} us of processor to open one and carry a request")
        print(f"carried: {ask(folder, Request(do='hello')).carried} connections")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    uvloop.run(main(parser.parse_args().quick))
