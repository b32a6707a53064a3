"""The gateway beside a bare proxy, a floor that records, and the field's own gateways.

Client, stub and nats-server share one core, the peer has another. Rounds are interleaved; medians are printed.
Rollyard is asked twice: each call a new conversation, whole in the log as with the floor (`rollyard`), and each call
the next turn of a conversation that it knows (`rollyard, later turn`). Each client is a session of its own.

    python tests/bench/bench_gateway.py [--quick] [--only calls,streams,memory,tokens,processes]
                                        [--peers litellm,agentlightning,mitmproxy | none] [--install]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop
from measure import table
from peers.canned import EVENTS, SIZES
from peers.gateway import GatewayPeer, gateways, register, register_tokens
from peers.installed import PACKAGES, START
from peers.measurements import Paced, Sample, Shape, calls, memory, paced
from peers.peer import HERE, Peer, World, bare, direct, floor
from peers.process import OURS, pin, started

from rollyard.gateway.local_model import demo_model_path
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import free_port, nats_server
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, SetupError

PARTS = ("calls", "streams", "memory", "processes", "tokens")
MANY = 16
SHAPES = [
    *(Shape(f"{name}, ids", size) for name, size in SIZES.items()),
    Shape("8 KB, ids, streamed", SIZES["8 KB"], stream=True),
    Shape("8 KB, no ids", SIZES["8 KB"], ids=False),
    Shape("8 KB, no ids, streamed", SIZES["8 KB"], ids=False, stream=True),
]


class Bench:
    """What runs, and how long the measurements are."""

    def __init__(self, world: World, bus: Bus, arguments: argparse.Namespace) -> None:
        self.world = world
        self.bus = bus
        self.installed: list[str] = arguments.peers
        self.rounds = 1 if arguments.quick else 3
        self.seconds = 1.0 if arguments.quick else 2.0
        self.streams = 200 if arguments.quick else 1000
        self.calls = 2000 if arguments.quick else 10_000

    async def empty(self) -> None:
        """Let go of what was logged: no measurement pays for the one before it."""
        for stream in (subjects.LOG, "FLOOR"):
            try:
                await self.bus.api(f"STREAM.PURGE.{stream}")
            except BusError:
                continue


@asynccontextmanager
async def bench(arguments: argparse.Namespace) -> AsyncIterator[Bench]:
    """A stub and a nats-server on one core, and a registered pool."""
    pin()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = await stack.enter_async_context(nats_server(folder / "nats"))
        port = free_port()
        command = [sys.executable, str(HERE / "stub.py"), str(port)]
        await stack.enter_async_context(started(command, folder / "stub.log", port, core=OURS))
        bus = await stack.enter_async_context(Bus.connect(nats.url, name="bench"))
        await ensure(bus)
        world = World(folder, port, nats.url)
        await register(bus, world)
        yield Bench(world, bus, arguments)


def load() -> str:
    """How busy the machine is with everything on it."""
    return "load of the machine (1, 5, 15 min): " + ", ".join(f"{value:.1f}" for value in os.getloadavg())


# --- calls ---

Samples = dict[tuple[str, str, int], list[Sample]]


async def measure_calls(bench: Bench) -> None:
    """Every peer, every shape, with one client and with many."""
    async with AsyncExitStack() as stack:
        peers: list[Peer] = [direct(bench.world)]
        peers += [await stack.enter_async_context(each(bench.world)) for each in (bare, floor)]
        ours = await stack.enter_async_context(gateways(bench.world, bench.bus))
        peers += [ours, ours.later_turns()]
        for name in bench.installed:
            if PACKAGES[name].is_installed():
                peers.append(await stack.enter_async_context(START[name](bench.world)))
            else:
                print(f"{PACKAGES[name].requirement} is not installed and left out; --install installs it")
        samples = await _rounds(bench, peers)
    for shape in SHAPES:
        print(f"\n{_calls_table(shape, [peer for peer in peers if shape.suits(peer)], samples)}")
    print(f"\n{_goals(peers, samples)}")


async def _rounds(bench: Bench, peers: Sequence[Peer]) -> Samples:
    samples: Samples = defaultdict(list)
    for number in range(bench.rounds):
        print(f"round {number + 1} of {bench.rounds}; {load()}", flush=True)
        for shape in SHAPES:
            for peer in peers:
                if not shape.suits(peer) or (peer.slow and number):
                    continue
                for count in (1, MANY):
                    sample = await calls(peer, shape, count=count, seconds=bench.seconds / (2 if count == 1 else 1))
                    samples[shape.name, peer.name, count].append(sample)
                    for error in sample.load.errors[:1]:
                        print(f"{peer.name}, {shape.name}: {len(sample.load.errors)} errors, the first: {error}")
                    await bench.empty()
    return samples


def _median(samples: list[Sample], key: str) -> float:
    values = [sample.load.rate if key == "rate" else getattr(sample, key) for sample in samples]
    return statistics.median(values) if values else float("nan")


def _calls_table(shape: Shape, peers: Sequence[Peer], samples: Samples) -> str:
    def of(name: str, count: int, key: str) -> float:
        return _median(samples[shape.name, name, count], key)

    rows = []
    for peer in peers:
        rate = of(peer.name, MANY, "rate")
        cells: list[object] = [peer.name, rate, rate / of("bare", MANY, "rate"), rate / of("floor", MANY, "rate")]
        if peer.name == "direct":
            cells += ["", "", ""]
        else:
            added_ms = of(peer.name, 1, "p50_ms") - of("direct", 1, "p50_ms")
            cells += [of(peer.name, MANY, "cpu_ms"), of(peer.name, 1, "cpu_ms"), added_ms]
        errors = sum(len(one.load.errors) for count in (1, MANY) for one in samples[shape.name, peer.name, count])
        rows.append([*cells, of(peer.name, MANY, "p50_ms"), errors])
    head = [shape.name, f"calls/s, {MANY} clients", "x bare", "x floor", "CPU ms a call", "CPU ms, 1 client"]
    return table([*head, "added p50 ms, 1 client", f"p50 ms, {MANY} clients", "errors"], rows)


def _goals(peers: Sequence[Peer], samples: Samples) -> str:
    rivals = [peer.name for peer in peers if peer.captures and peer.slow]
    rows = [
        _goal_row(shape, ours, rivals, samples) for shape in SHAPES for ours in ("rollyard", "rollyard, later turn")
    ]
    head = ["Rollyard over", "floor: calls/s", "floor: CPU", "floor: added p50"]
    head += ["best capturing peer: calls/s", "best capturing peer: CPU"]
    return table(head, [["goal", ">= 0.8", "", "<= 1.5", ">= 8", ""], *rows])


def _goal_row(shape: Shape, ours: str, rivals: Sequence[str], samples: Samples) -> list[object]:
    def of(name: str, count: int, key: str) -> float:
        return _median(samples[shape.name, name, count], key)

    direct_ms = of("direct", 1, "p50_ms")
    row: list[object] = [
        f"{shape.name}: {ours}",
        of(ours, MANY, "rate") / of("floor", MANY, "rate"),
        of(ours, MANY, "cpu_ms") / of("floor", MANY, "cpu_ms"),
        (of(ours, 1, "p50_ms") - direct_ms) / (of("floor", 1, "p50_ms") - direct_ms),
    ]
    seen = [name for name in rivals if samples[shape.name, name, MANY]]
    if not seen:
        return [*row, "", ""]
    best = max(seen, key=lambda name: of(name, MANY, "rate"))
    rate, cpu_ms = of(ours, MANY, "rate"), of(ours, MANY, "cpu_ms")
    return [*row, rate / of(best, MANY, "rate"), cpu_ms / of(best, MANY, "cpu_ms")]


# --- the other parts ---


async def measure_streams(bench: Bench) -> None:
    """Many paced streams in one process."""
    ideal_s = (EVENTS - 1) * 0.1
    rows: list[list[object]] = []
    async with AsyncExitStack() as stack:
        peers: list[Peer] = [direct(bench.world)]
        peers += [await stack.enter_async_context(each(bench.world)) for each in (bare, floor)]
        peers.append(await stack.enter_async_context(gateways(bench.world, bench.bus)))
        for peer in peers:
            result: Paced = await paced(peer, bench.streams, ideal_s)
            for error in result.errors[:1]:
                print(f"{peer.name}: the first error: {error}")
            free = peer.name == "direct"
            cost: list[object] = ["", ""] if free else [result.us_per_event, result.peak_mib]
            rows.append(
                [peer.name, len(result.errors), *cost, result.first_p50_ms, result.late_p50_s, result.late_max_s]
            )
            await bench.empty()
    rows.append(["goal", 0, "<= 110", "< 200", "", "", "< 1"])
    head = [f"{bench.streams} open streams, 10 events/s each", "errors", "CPU us an event", "peak MiB"]
    print(table([*head, "first byte p50 ms", "last byte late s, p50", "the latest"], rows))


async def measure_memory(bench: Bench) -> None:
    """Resident memory over many calls; a session has 20."""
    async with gateways(bench.world, bench.bus) as peer:
        seen = await memory(peer, bench.calls)
    print(table(["calls of 8 KB", "MiB (goal: flat, < 80)"], seen))
    await bench.empty()


async def measure_tokens(bench: Bench) -> None:
    """Tokens mode with a short and a long history."""
    try:
        tokenizer = demo_model_path()
    except SetupError:
        print("no local model is installed, so tokens mode is left out; `make install` installs one")
        return
    # A token of these words is about two bytes and a half.
    shapes = [Shape(f"{tokens // 1000}k", tokens * 5 // 2, model="tokens") for tokens in (3000, 30_000)]
    found: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    await register_tokens(bench.bus, bench.world, tokenizer)
    async with gateways(bench.world, bench.bus) as peer:
        for _ in range(bench.rounds):
            for shape in shapes:
                for count in (1, MANY):
                    sample = await calls(peer.later_turns(), shape, count=count, seconds=bench.seconds)
                    found[shape.name, count].append(sample)
                    await bench.empty()
    rows = []
    for shape in shapes:
        one, many = found[shape.name, 1], found[shape.name, MANY]
        figures = [_median(one, "p50_ms"), _median(many, "rate"), _median(many, "cpu_ms")]
        rows.append([shape.name, *figures, figures[-1] / _median(found[shapes[0].name, MANY], "cpu_ms")])
    head = ["tokens mode, history of", "p50 ms, 1 client", "calls/s, 16 clients", "CPU ms a call"]
    print(table([*head, "x 3k (goal: <= 1.5)"], rows))


async def measure_processes(bench: Bench) -> None:
    """One process against two that share a core: calls/s cannot grow there, and the cost of a call must not."""
    found: dict[str, list[Sample]] = defaultdict(list)
    shape = SHAPES[0]
    async with gateways(bench.world, bench.bus) as one, gateways(bench.world, bench.bus, 2, "two") as two:
        peers: tuple[GatewayPeer, ...] = (one, two)
        for _ in range(bench.rounds):
            for peer in peers:
                found[peer.name].append(await calls(peer, shape, count=MANY, seconds=bench.seconds))
                await bench.empty()
    one_ms = _median(found[one.name], "cpu_ms")
    rows = [
        [
            len(peer.ports),
            _median(found[peer.name], "rate"),
            cpu_ms := _median(found[peer.name], "cpu_ms"),
            cpu_ms / one_ms,
        ]
        for peer in peers
    ]
    print(table(["gateway processes on one core", "calls/s", "CPU ms a call", "x one (goal: flat)"], rows))


MEASURE = {
    "calls": measure_calls,
    "streams": measure_streams,
    "memory": measure_memory,
    "tokens": measure_tokens,
    "processes": measure_processes,
}


async def run(arguments: argparse.Namespace) -> None:
    """The parts that were asked for."""
    task = asyncio.current_task()
    assert task is not None
    # Ended politely, this ends what it started.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with bench(arguments) as running:
        for part in arguments.only:
            print(f"\n{load()}", flush=True)
            await MEASURE[part](running)


def main() -> None:
    """Read the arguments, install or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, metavar="PARTS")
    parser.add_argument("--peers", type=_peers, default=list(PACKAGES), metavar="NAMES")
    parser.add_argument("--install", action="store_true", help="install the peers (about 1.5 GB) and end")
    arguments = parser.parse_args()
    if arguments.install:
        for name in arguments.peers:
            try:
                PACKAGES[name].install()
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(f"{name} is not installed: {error}")
        return
    uvloop.run(run(arguments))


def _peers(text: str) -> list[str]:
    return [name for name in text.split(",") if name in PACKAGES]


if __name__ == "__main__":
    main()
