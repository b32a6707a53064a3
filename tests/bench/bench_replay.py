"""What replay costs beside reading and decoding the log: sessions of 10, 50 and 200 turns in the LOG of a nats-server.

python tests/bench/bench_replay.py [--mb 60] [--rounds 3] [--turns 10,50,200]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from measure import table
from msgspec import structs

from rollyard.pipeline.archive.folder import RunArchive
from rollyard.pipeline.archive.reader import ArchiveLog
from rollyard.pipeline.archive.writer import ArchiveWriter
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.embedded import nats_server
from rollyard.pipeline.log import BusLog, LogSource
from rollyard.pipeline.replay import commit_of
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent
from rollyard.schemas.sample import Commit, SampleDigest
from rollyard.stages.replay import replay_run
from rollyard.stages.stitching import STITCHER_VERSION, samples_of

SESSION_TOKENS = 30_000
PROMPT_TOKENS = 2000
SAMPLED_SHARE = 0.25
VOCABULARY = 150_000
WORDS = [
    f"{a}{b}" for a in ("re", "un", "de", "pro", "con", "tra") for b in ("build", "test", "file", "line", "int", "str")
]
TOOLS = [
    {"type": "function", "function": {"name": f"tool{number}", "description": "It does what it says. " * 20}}
    for number in range(8)
]
IN_FLIGHT = 16


def text(rng: random.Random, tokens: int) -> str:
    """About four characters a token."""
    return " ".join(rng.choices(WORDS, k=max(1, tokens // 2)))


def session(rollout: Rollout, turns: int) -> Iterator[CallEvent | RolloutEvent]:
    """The events of an agent that makes `turns` calls, logged as a gateway logs them."""
    rng = random.Random(rollout.index)
    numbers = np.random.default_rng(rollout.index)

    def ids(count: int) -> TokenIds:
        return TokenIds(numbers.integers(0, VOCABULARY, count, dtype="<u4").tobytes())

    a_turn = (SESSION_TOKENS - PROMPT_TOKENS) // turns
    sampled = int(a_turn * SAMPLED_SHARE)
    known = 0
    named: dict[str, Any] = {"run": rollout.run, "rollout_id": rollout.rollout_id, "attempt": 1}
    yield RolloutEvent(kind="initialized", rollout=rollout, attempt=1, at_ms=1)
    for turn in range(turns):
        call_id = f"{rollout.index:06}-{turn:06}"
        first = turn == 0
        new = PROMPT_TOKENS if first else a_turn - sampled
        told = text(rng, new)
        yield CallIntent(
            call_id=call_id,
            gateway="g",
            at_ms=turn,
            latest_end_ms=turn + 1000,
            parent=None if first else f"{rollout.index:06}-{turn - 1:06}",
            shared_messages=0 if first else 2 * turn + 1,
            messages=[{"role": "system", "content": "You are an agent. " * 200}, {"role": "user", "content": told}]
            if first
            else [{"role": "tool", "tool_call_id": f"call{turn - 1}", "content": told}],
            tools=TOOLS if first else None,
            params={"temperature": 1.0, "max_tokens": 4096},
            model="m",
            **named,
        )
        function = {"name": "tool1", "arguments": '{"command": "make test"}'}
        yield CallEnd(
            call_id=call_id,
            at_ms=turn,
            status="ok",
            shared_prompt_ids=known,
            prompt_ids=ids(new),
            completion_ids=ids(sampled),
            logprobs=Logprobs((-numbers.exponential(0.5, sampled)).astype("<f4").tobytes()),
            logprob_kind="raw",
            reply={
                "role": "assistant",
                "content": text(rng, sampled),
                "tool_calls": [{"id": f"call{turn}", "type": "function", "function": function}],
            },
            finish_reason="tool_calls",
            policy_version=turn // 8,
            **named,
        )
        known += new + sampled
    yield RolloutEvent(
        kind="ran",
        rollout=rollout,
        attempt=1,
        at_ms=2,
        status="completed",
        result=AgentResult(exit_code=0, answer="42"),
    )
    yield RolloutEvent(kind="evaluated", rollout=rollout, attempt=1, at_ms=3, reward=1.0)


@dataclass
class Log:
    """What stands in the LOG of the server."""

    events: int = 0
    stored_bytes: int = 0
    rollouts: int = 0


async def publish(bus: Bus, run: str, turns: int, wanted_bytes: int) -> Log:
    """Log sessions, 16 of them at a time, until their bodies are that large."""
    log = Log()

    async def agent() -> None:
        while log.stored_bytes < wanted_bytes:
            rollout = Rollout.of(run, "task", log.rollouts, 1 << 20)
            log.rollouts += 1
            stored: list[tuple[int, Any]] = []
            for event in session(rollout, turns):
                kind = "life" if isinstance(event, RolloutEvent) else "call"
                slim = await bus.contents.take_out(event) if isinstance(event, CallIntent) else event
                data = encode(slim)
                seq = await bus.publish(subjects.log_subject(run, rollout.rollout_id, kind), data)
                log.events += 1
                log.stored_bytes += len(data)
                stored.append((seq, event))
            data = encode(committed(rollout, stored))
            await bus.create(subjects.log_subject(run, rollout.rollout_id, "commit"), data)

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(agent())
    return log


def committed(rollout: Rollout, stored: list[tuple[int, Any]]) -> Commit:
    """The commit that an aggregator would create."""
    commit = Commit(
        run=rollout.run,
        task_id=rollout.task_id,
        group_id=rollout.task_id,
        group_size=rollout.group_size,
        rollout_id=rollout.rollout_id,
        index=rollout.index,
        attempt=1,
        status="completed",
        cut_seq=stored[-1][0],
        closed_seq=stored[-2][0],
        evaluated_seq=stored[-1][0],
        stitcher=STITCHER_VERSION,
    )
    digests = [
        SampleDigest(sample_id=each.sample_id, digest=sample_digest(each)) for each in samples_of(stored, commit)
    ]
    return structs.replace(commit, samples=tuple(digests))


async def read_only(source: LogSource, run: str) -> None:
    """Hand every message over, sorted by rollout."""
    async for _ in source.rollouts(run):
        pass


async def read_and_decode(source: LogSource, run: str) -> None:
    """The same, and make records of the messages."""
    async for rollout in source.rollouts(run):
        rollout.events()


async def read_decode_stitch(source: LogSource, run: str) -> None:
    """The same, and make samples of the records."""
    async for rollout in source.rollouts(run):
        events = rollout.events()
        samples_of(events, commit_of(rollout))


async def full_replay(source: LogSource, run: str) -> None:
    """What `rollyard replay` does, digests included."""
    report = await replay_run(source, run)
    assert report.ok
    assert report.samples


STEPS: dict[str, Callable[[LogSource, str], Awaitable[None]]] = {
    "read": read_only,
    "read, decode": read_and_decode,
    "read, decode, stitch": read_decode_stitch,
    "replay": full_replay,
}
Costs = dict[tuple[str, str], tuple[float, float]]


async def measure(sources: dict[str, LogSource], run: str, rounds: int) -> Costs:
    """Seconds and CPU seconds of this process for each step: the least of the rounds, which are interleaved."""
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, source in sources.items():
            for step, work in STEPS.items():
                began = time.perf_counter(), time.process_time()
                await work(source, run)
                took = time.perf_counter() - began[0], time.process_time() - began[1]
                seen.setdefault((name, step), []).append(took)
    return {each: (min(s for s, _ in all_of), min(c for _, c in all_of)) for each, all_of in seen.items()}


async def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=40, help="size of each log, as stored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", default="10,50,200")
    given = parser.parse_args()
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            nats_server(folder / "nats") as server,
            Bus.connect(server.url, name="bench", blobs=BlobStore(folder / "blobs")) as bus,
        ):
            await ensure(bus)
            for turns in map(int, given.turns.split(",")):
                run = f"turns{turns}"
                log = await publish(bus, run, turns, int(given.mb * 1e6))
                archive = RunArchive(folder / "archive", run)
                with archive.locked():
                    await ArchiveWriter(bus, archive).run()
                sources: dict[str, LogSource] = {"log": BusLog(bus), "archive": ArchiveLog(folder / "archive")}
                found = await measure(sources, run, given.rounds)
                rows += [[turns, *row] for row in rows_of(log, found)]
    print(table(HEAD, rows))


HEAD = ["turns", "from", "step", "events", "bytes an event", "MB/s", "MB a CPU second", "times read, decode"]


def rows_of(log: Log, found: Costs) -> Iterator[list[object]]:
    """One for each step."""
    mb = log.stored_bytes / 1e6
    for (name, step), (wall_s, busy_s) in found.items():
        times = busy_s / found[name, "read, decode"][1]
        yield [name, step, log.events, log.stored_bytes / log.events, mb / wall_s, mb / busy_s, times]


if __name__ == "__main__":
    uvloop.run(main())
