"""What is measured of a peer."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

import msgspec
from peers.canned import CONTENT, EVENTS, Body, body
from peers.client import Caller, Connection, Load, closed_loop, open_streams, request
from peers.peer import Door, Peer
from peers.process import peak_rss_mib, tree_cpu_s, tree_rss_mib

_numbers: Iterator[int] = itertools.count()
SSE_END = b"[DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """What the calls of a measurement look like."""

    name: str
    size: int
    ids: bool = True
    stream: bool = False
    model: str = ""

    @property
    def asked(self) -> str:
        return self.model or ("exact" if self.ids else "plain")

    def suits(self, peer: Peer) -> bool:
        return (peer.streams or not self.stream) and (peer.plain or self.ids)


@dataclass
class Sample:
    """One measurement. Processor seconds of the peer's process tree."""

    load: Load
    cpu_s: float

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s / max(1, len(self.load.replies)) * 1e3

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.load.latencies_ms() or [float("nan")])


@asynccontextmanager
async def clients(peer: Peer, shape: Shape, count: int) -> AsyncIterator[list[tuple[Connection, Caller]]]:
    """Connections that are open, and have made a first call each unless it would be slow; and what they ask next."""
    ready: list[tuple[Connection, Caller]] = []
    try:
        for number in range(count):
            door = await peer.door(number, shape.asked)
            connection = Connection(door.port)
            await connection.open()
            asked = body(shape.asked, shape.size, stream=shape.stream)
            if shape.asked != "paced":
                content = await _first_call(peer, shape, door, connection)
                if peer.continues:
                    asked = body(shape.asked, shape.size, stream=shape.stream, reply=content)
            ready.append((connection, _caller(door, asked)))
        yield ready
    finally:
        for connection, _ in ready:
            connection.close()
        await peer.leave()


async def _first_call(peer: Peer, shape: Shape, door: Door, connection: Connection) -> str:
    """What is replied to it. It has the messages of later turns up to the reply, where there are any."""
    first = body(shape.asked, shape.size, stream=False, reply=CONTENT if peer.continues else None)
    first = without_last(first) if peer.continues else first
    reply = await connection.call(request(door.path, door.headers, first.numbered(next(_numbers))))
    if reply.error:
        raise RuntimeError(f"{peer.name}, {shape.name}: {reply.error}")
    return str(msgspec.json.decode(reply.body)["choices"][0]["message"]["content"])


@cache
def without_last(asked: Body) -> Body:
    """The turn before: without the reply and the question that follows it."""
    decoded = msgspec.json.decode(asked.numbered(0))
    decoded["messages"] = decoded["messages"][:-2]
    return Body(msgspec.json.encode(decoded)[:-1] + b',"seed":1', b"}")


def _caller(door: Door, asked: Body) -> Caller:
    return lambda: request(door.path, door.headers, asked.numbered(next(_numbers)))


async def calls(peer: Peer, shape: Shape, *, count: int, seconds: float = 0, number: int = 0) -> Sample:
    """A closed loop of `count` clients, for `seconds` or for `number` calls."""
    async with clients(peer, shape, count) as ready:
        before = tree_cpu_s(peer.pids)
        load = await closed_loop(ready, seconds=seconds, calls=number, ends_with=SSE_END if shape.stream else b"")
        return Sample(load, tree_cpu_s(peer.pids) - before)


@dataclass
class Paced:
    """Many open streams: processor microseconds an event, seconds by which their last bytes were late, MiB."""

    errors: list[str]
    us_per_event: float
    first_p50_ms: float
    late_p50_s: float
    late_max_s: float
    peak_mib: float


async def paced(peer: Peer, count: int, ideal_s: float) -> Paced:
    """`count` streams at once, each with an event every 100 ms. `ideal_s`: how long one takes with nothing between."""
    shape = Shape("paced", 8 * 1024, stream=True, model="paced")
    async with clients(peer, shape, count) as ready:
        before = tree_cpu_s(peer.pids)
        load = await open_streams(ready, ends_with=SSE_END)
        cpu_s = tree_cpu_s(peer.pids) - before
    late_s = [taken_ms / 1e3 - ideal_s for taken_ms in load.latencies_ms()] or [float("nan")]
    firsts = [(reply.first_s - reply.sent_s) * 1e3 for reply in load.good]
    return Paced(
        errors=load.errors,
        us_per_event=cpu_s / (count * EVENTS) * 1e6,
        first_p50_ms=statistics.median(firsts or [float("nan")]),
        late_p50_s=statistics.median(late_s),
        late_max_s=max(late_s),
        peak_mib=peak_rss_mib(peer.pids) if peer.pids else 0.0,
    )


async def memory(peer: Peer, total: int, *, sessions_of: int = 20, count: int = 16) -> list[tuple[int, float]]:
    """(calls made, resident MiB) on the way to `total` calls of 8 KB, with new sessions every so many calls."""
    shape = Shape("memory", 8 * 1024)
    seen, made, step = [(0, tree_rss_mib(peer.pids))], 0, total // 4
    while made < total:
        await calls(peer, shape, count=count, number=count * (sessions_of - 1))
        made += count * sessions_of
        if made // step > seen[-1][0] // step or made >= total:
            seen.append((made, tree_rss_mib(peer.pids)))
    return seen
