"""Stitching beside a floor in 40 lines and what others build their sequences with, on the same sessions.

Each builder is a process of its own, told in turn to stitch; medians of the processor time of a session are printed.
The floor and Rollyard begin with the bytes of the log's events, NeMo Gym with the lines of its store. Those "from
objects" get what they take ready-made, before the clock starts: others calls with whole prompts, Rollyard its events.

    python tests/bench/bench_stitching.py [--quick] [--peers verifiers,nemo-gym,agentlightning | none] [--install]
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from measure import table
from peers.stitch_builders import PEERS, Builder, Running, builders, installed, running
from peers.stitch_loop import summary
from peers.stitch_sessions import Session

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.contents import Contents
from rollyard.schemas.policy import SamplePolicy
from rollyard.stages.stitching import STITCHER_VERSION

TURNS: Final = {10: 8, 50: 4, 200: 2}
"""Turns of the main agent, and how many such sessions there are."""
POLICY: Final = SamplePolicy(scenarios=("main", "sub_agent", "compaction"))
"""The others know no scenarios, so that everybody keeps the compaction."""
PEER_ROUNDS: Final = 3
"""Others are slow, and far away."""
OURS: Final = "Rollyard"
Cpu = dict[tuple[str, int], list[float]]
Results = dict[str, dict[int, Any]]


@dataclass
class Data:
    """Sessions by their turns: what ours and the floor read, what the others read, what is true, and sizes in bytes.

    The size of a session is that of its events as msgpack, unpacked, with tools and system prompts at their places.
    """

    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    truth: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    sizes: dict[int, list[int]] = field(default_factory=dict)
    longest: dict[int, int] = field(default_factory=dict)

    def size(self, turns: int) -> float:
        """Mean bytes of a session."""
        return statistics.mean(self.sizes[turns])


def make_data(blobs: Path) -> Data:
    """The sessions."""
    data, contents = Data(), Contents(BlobStore(blobs))
    for turns, count in TURNS.items():
        sessions = [Session(turns, seed) for seed in range(count)]
        commits = [session.close(stitcher=STITCHER_VERSION, policy=POLICY) for session in sessions]
        events = [session.encoded(contents) for session in sessions]
        data.events[turns] = [{"events": each, "commit": commit} for each, commit in zip(events, commits, strict=True)]
        data.calls[turns] = [{"calls": session.whole_calls()} for session in sessions]
        data.truth[turns] = [summary(session.truth()) for session in sessions]
        data.sizes[turns] = [session.size() for session in sessions]
        data.longest[turns] = max(len(mask) for session in sessions for _, mask, _ in session.truth())
    return data


# --- measuring ---


def measure(started: Sequence[Running], rounds: int, least_s: float) -> Cpu:
    """Every builder, every length, interleaved."""
    found: Cpu = defaultdict(list)
    for number in range(rounds):
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"round {number + 1} of {rounds}; load of the machine (1, 5, 15 min): {load}", flush=True)
        for turns in TURNS:
            for each in started:
                if each.builder.peer and number >= PEER_ROUNDS:
                    continue
                found[each.builder.name, turns].append(each.cpu_s(turns, least_s=least_s))
    return found


def slope(seconds: Sequence[float], sizes: Sequence[float]) -> float:
    """By which power of its bytes the time of a session grows: a straight line through the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(x, y).slope


# --- tables ---


def median_s(cpu: Cpu, name: str, turns: int) -> float:
    """Processor seconds of a session."""
    return statistics.median(cpu[name, turns])


def cpu_table(started: Sequence[Running], cpu: Cpu, data: Data) -> str:
    """What a session costs."""
    sizes = [data.size(turns) for turns in TURNS]
    rows = []
    for each in started:
        name = each.builder.name
        seconds = [median_s(cpu, name, turns) for turns in TURNS]
        over = [value / median_s(cpu, "floor", turns) for value, turns in zip(seconds, TURNS, strict=True)]
        rate = sizes[-1] / seconds[-1] / 1e6
        rows.append([name, *(value * 1e3 for value in seconds), *over, slope(seconds, sizes), rate])
    head = ["builder", *(f"CPU ms, {turns} turns" for turns in TURNS), *(f"x floor, {turns}" for turns in TURNS)]
    return table([*head, "slope", "MB/s, 200 turns"], rows)


def result_table(results: Results, data: Data) -> str:
    """What came out, and the memory that it took."""
    truth = [data.truth[turns] for turns in TURNS]
    rows: list[list[object]] = [["exact", "", "", "", *_counts(truth), ""]]
    for name, by_turns in results.items():
        found = [by_turns[turns]["results"] for turns in TURNS]
        verdict = "yes" if found == truth else "counts only" if _counts(found) == _counts(truth) else "no"
        rows.append([name, *(peak_ratio(by_turns, data, turns) for turns in TURNS), *_counts(found), verdict])
    head = ["builder", *(f"peak memory / session, {turns}" for turns in TURNS)]
    head += [f"sequences, tokens, {turns}" for turns in TURNS]
    return table([*head, "exact"], rows)


def peak_ratio(by_turns: dict[int, Any], data: Data, turns: int) -> float:
    """The highest of all sessions: what was allocated at once, over the size of the session."""
    return max(peak / size for peak, size in zip(by_turns[turns]["peaks"], data.sizes[turns], strict=True))


def _counts(results: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    means = [[statistics.mean(one[key] for one in each) for key in ("sequences", "tokens")] for each in results]
    return [f"{sequences:g}, {tokens:,.0f}" for sequences, tokens in means]


def goals_table(cpu: Cpu, results: Results, data: Data) -> str:
    """The goals, and what was measured."""
    sizes = [data.size(turns) for turns in TURNS]

    def over(name: str, other: str) -> list[object]:
        return [median_s(cpu, name, turns) / median_s(cpu, other, turns) for turns in TURNS]

    slopes = {name: slope([median_s(cpu, name, turns) for turns in TURNS], sizes) for name in ("floor", OURS)}
    exact = ["yes" if results[OURS][turns]["results"] == data.truth[turns] else "no" for turns in TURNS]
    rows: list[list[object]] = [
        ["CPU over the floor", "<= 3", *over(OURS, "floor")],
        ["slope over the floor's", "<= 1.1", "", "", slopes[OURS] / slopes["floor"]],
        ["peak memory over the session", "< 3", *(peak_ratio(results[OURS], data, turns) for turns in TURNS)],
        ["ids, mask and logprobs exact", "yes", *exact],
    ]
    for peer, least in (("NeMo Gym", 4), ("NeMo Gym, from objects", 4), ("verifiers, from objects", 15)):
        if (peer, 10) in cpu:
            ours = f"{OURS}, from objects" if "objects" in peer else OURS
            rows.append([f"CPU of {peer}, over ours", f">= {least}", *over(peer, ours)])
    return table(["goal", "wanted", *(f"{turns} turns" for turns in TURNS)], rows)


# --- all of it ---


def run(chosen: Sequence[str], *, rounds: int, least_s: float) -> None:
    """Measure and print."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = make_data(folder / "blobs")
        files = {name: folder / f"{name}.pickle" for name in ("events", "calls")}
        files["events"].write_bytes(pickle.dumps(data.events))
        files["calls"].write_bytes(pickle.dumps(data.calls))
        print(f"stitcher {STITCHER_VERSION}; " + "; ".join(_describe(data, turns) for turns in TURNS))
        wanted = [each for each in builders(folder / "blobs") if not each.peer or each.peer in chosen]
        started = [stack.enter_context(_start(each, files, folder)) for each in installed(wanted)]
        cpu = measure(started, rounds, least_s)
        results: Results = {
            each.builder.name: {turns: each.order(turns=turns, memory=True) for turns in TURNS}
            for each in started
            if each.builder.exact
        }
    print(f"\n{cpu_table(started, cpu, data)}\n\n{result_table(results, data)}\n\n{goals_table(cpu, results, data)}")


def _start(builder: Builder, files: dict[str, Path], folder: Path) -> Any:
    reads_events = not builder.peer and "whole" not in builder.arguments
    return running(builder, files["events" if reads_events else "calls"], folder)


def _describe(data: Data, turns: int) -> str:
    calls = statistics.mean(len(each["calls"]) for each in data.calls[turns])
    return f"{turns} turns: {calls:.0f} calls, up to {data.longest[turns]:,} tokens, {data.size(turns) / 1000:.0f} kB"


def main() -> None:
    """Read the arguments, install or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--peers", type=lambda text: [name for name in text.split(",") if name in PEERS], default=PEERS)
    parser.add_argument("--install", action="store_true", help="install the peers (about 700 MB) and end")
    arguments = parser.parse_args()
    if arguments.install:
        for name in arguments.peers:
            try:
                PEERS[name].install()
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(f"{name} is not installed: {error}")
        return
    run(list(arguments.peers), rounds=1 if arguments.quick else 7, least_s=0.02 if arguments.quick else 0.2)


if __name__ == "__main__":
    main()
