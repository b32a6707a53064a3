"""A store without room: everybody says so, nothing is lost, and after room is made the work goes on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import CapturingLogger

import rollyard
from rollyard.pipeline import bus as bus_module
from rollyard.pipeline import consumer
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.config import AdmitConfig
from rollyard.pipeline.datasets import query
from rollyard.pipeline.embedded import EmbeddedNats, nats_server
from rollyard.pipeline.streams import Limits, ensure
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusAway, BusFull
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Delivery, Sample
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task

MB = 1 << 20
SMALL = Limits(
    tasks_max_bytes=2 * MB,
    stages_max_bytes=2 * MB,
    log_max_bytes=2 * MB,
    samples_max_bytes=2 * MB,
    dead_max_bytes=2 * MB,
    alarms_max_bytes=1 * MB,
)


def noise(size: int, seed: int = 0) -> str:
    """A text that no compression makes small."""
    return random.Random(seed).randbytes(size // 2).hex()


def tasks(count: int, size: int = 200_000) -> list[dict[str, Any]]:
    return [
        {"id": f"t{n}", "prompt": noise(size, n), "agent": {"harness": "noop"}, "sandbox": {"backend": "none"}}
        for n in range(count)
    ]


async def program(
    *arguments: str, url: str, folder: Path, limit_bytes: int | None = None, ended_by: asyncio.Event | None = None
) -> tuple[int, str]:
    """Run `rollyard` until it ends, or until SIGTERM once the event is set: (exit code, standard error).

    Its files may have `limit_bytes`.
    """

    def limit() -> None:
        assert limit_bytes is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rollyard", *arguments),
        cwd=folder,
        env=os.environ | {"ROLLYARD__NATS__URL": url, "ROLLYARD__SINK__MAX_WAIT_S": "0.1"},
        preexec_fn=limit if limit_bytes is not None else None,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if ended_by is not None:
        await ended_by.wait()
        process.terminate()
    _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def stored_tasks(bus: Bus) -> int:
    return int((await bus.stream_info(subjects.TASKS))["state"]["messages"])


async def test_a_server_with_less_room_than_the_streams_ask_for(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats", max_file_store_bytes=64 * MB) as server:
        code, said = await program("worker", "--stages", "aggregate", url=server.url, folder=tmp_path)
        assert code == 4
        assert "nats-server has no room for stream TASKS of 8 GiB: " in said
        assert "(lower the sizes under [limits], or raise max_file in the configuration of nats-server)" in said


async def test_submit_says_how_far_it_came_and_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks(30))))
    async with nats_server(tmp_path / "nats") as server, Bus.connect(server.url, name="test") as bus:
        await ensure(bus, SMALL)
        code, said = await program("submit", "tasks.jsonl", "--run", "r", url=server.url, folder=tmp_path)
        assert code == 4
        done = await stored_tasks(bus)
        assert 0 < done < 30
        assert " of 30 tasks were published, then: no room for task.r: maximum bytes exceeded" in said
        assert "give the store more room, or archive and purge closed runs; then submit the same tasks again" in said
        config = (await bus.stream_info(subjects.TASKS))["config"]
        await bus.api("STREAM.UPDATE.TASKS", config | {"max_bytes": 64 * MB})
        code, _ = await program("submit", "tasks.jsonl", "--run", "r", url=server.url, folder=tmp_path)
        assert (code, await stored_tasks(bus)) == (0, 30)


async def test_a_server_whose_store_is_full(tmp_path: Path) -> None:
    """max_file_store: the buckets have no limit of their own, so they can take what the streams leave."""
    async with (
        nats_server(tmp_path / "nats", max_file_store_bytes=12 * MB) as server,
        Bus.connect(server.url, name="test") as bus,
    ):
        await ensure(bus, SMALL)
        with pytest.raises(BusFull) as full:
            for number in range(1000):
                await bus.publish(f"$KV.tasks.other.t{number}", noise(200_000).encode())
        assert "no room for $KV.tasks.other.t" in str(full.value)
        assert "insufficient resources" in str(full.value)
        assert "give the store more room" in str(full.value)
        async with rollyard.connect(server.url, run="r", blobs=tmp_path) as client:
            with pytest.raises(BusFull, match="no room for"):
                await client.submit(tasks(1))
        await bus.api("STREAM.PURGE.KV_tasks")
        async with rollyard.connect(server.url, run="r", blobs=tmp_path) as client:
            assert (await client.submit(tasks(1))).accepted == 1


async def test_a_server_whose_disk_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JetStream gives no answer then, until it is started again; what it acknowledged is there."""
    monkeypatch.setattr(bus_module, "REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(bus_module, "WRITE_TRIES", 2)
    given = tasks(30)
    async with nats_server(tmp_path / "nats") as server, Bus.connect(server.url, name="test") as bus:
        await ensure(bus)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (MB, resource.RLIM_INFINITY))
        async with rollyard.connect(server.url, run="r", blobs=tmp_path) as client:
            with pytest.raises(BusAway) as silent:
                await client.submit(given)
        said = str(silent.value)
        assert " of 30 tasks were published, then: no answer from the bus within 0.5 s to a request on task.r" in said
        assert "If its log shows write errors, make room on its disk and start it again" in said
        assert "then submit the same tasks again: none is taken twice" in said
        acknowledged = int(said.partition(" of ")[0])
        assert acknowledged > 0
        assert "file too large" in (tmp_path / "nats" / "nats.log").read_text()
    async with nats_server(tmp_path / "nats") as server, Bus.connect(server.url, name="test") as bus:
        assert acknowledged <= await stored_tasks(bus) < 30
        async with rollyard.connect(server.url, run="r", blobs=tmp_path) as client:
            await client.submit(given)
        assert await stored_tasks(bus) == 30


async def test_a_disk_that_takes_no_blob(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks(1, 2 * MB))))
    arguments = ("submit", "tasks.jsonl", "--run", "r")
    code, said = await program(*arguments, url=nats.url, folder=tmp_path, limit_bytes=100_000)
    assert code == 1
    assert said.startswith("rollyard: 0 of 1 tasks were published, then: cannot write a blob of ")
    assert ": File too large (make room, or set [store] blobs to a folder that every role can write" in said
    assert [path for path in (tmp_path / ".rollyard" / "blobs").rglob("*") if path.is_file()] == []
    assert await stored_tasks(bus) == 0
    code, said = await program(*arguments, url=nats.url, folder=tmp_path)
    assert (code, said.partition(" now,")[0]) == (0, "warning: no worker offers the sandbox backend none")
    assert await stored_tasks(bus) == 1
    (blob,) = [path for path in (tmp_path / ".rollyard" / "blobs").rglob("*") if path.is_file()]
    assert BlobStore(tmp_path / ".rollyard" / "blobs").get(blob.name)


async def test_a_log_that_is_full_holds_the_work_and_loses_none(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rollout goes on in its first attempt, whatever it was about to log."""
    alarms = CapturingLogger()
    monkeypatch.setattr(consumer, "log", alarms)
    config = (await crew.bus.stream_info(subjects.LOG))["config"]
    await crew.bus.api("STREAM.UPDATE.LOG", config | {"max_bytes": 8_000})
    noop = AgentSpec(harness="noop", args={"answer": "yes"})
    # ADMIT lets them in though the log is over 70 % full, so that the later stages meet it when it is full.
    crew.config = structs.replace(crew.config, admit=AdmitConfig(full=1.0))
    await crew.submit(Task(prompt="p", id="t", group_size=24, agent=noop, sandbox=SandboxSpec(backend="none")))
    async with crew.at_work("admit", "init", "run", "eval", "aggregate"):

        async def stuck() -> bool:
            return len(alarms.calls) >= 50

        await crew.until(stuck)
        assert {call.args[0] for call in alarms.calls} == {"waits_for_the_bus"}
        assert "no room for log.r." in alarms.calls[0].kwargs["error"]
        assert len(await crew.deliveries()) < 24
        await crew.bus.api("STREAM.UPDATE.LOG", config)

        async def all_there() -> bool:
            return len(await crew.bus.subjects(subjects.SAMPLES, "sample.r.*.*")) == 24

        await crew.until(all_there)
    outcomes = {(one.status, one.attempt, one.answer) for one in await crew.deliveries()}
    assert outcomes == {("completed", 1, "yes")}
    assert await crew.letters() == []


async def test_a_sink_without_room_stops_and_the_next_one_writes_everything(
    bus: Bus, nats: EmbeddedNats, tmp_path: Path
) -> None:
    ids = list(range(40_000))
    random.Random(1).shuffle(ids)
    for index in range(6):
        facts = {"run": "r", "task_id": "t", "group_id": "t", "rollout_id": f"x{index}", "index": index, "attempt": 1}
        sample = Sample(
            **facts,
            sample_id=f"s{index}",
            branch=0,
            branches=1,
            scenario="main",
            status="completed",
            token_ids=TokenIds.of(ids),
            loss_mask=LossMask.of([1] * len(ids)),
            logprobs=Logprobs.of([-1 / (1 + n) for n in ids]),
            policy_versions=Versions.of([0] * len(ids)),
        )
        delivery = Delivery(**facts, group_size=6, status="completed", samples=(sample,))
        await bus.create(subjects.sample_subject("r", "t", index), encode(delivery))
    code, said = await program("sink", url=nats.url, folder=tmp_path, limit_bytes=200_000)
    assert code == 3, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("rollyard: ")
    assert "File too large" in last
    assert str(tmp_path / ".rollyard" / "samples") in last or ".rollyard/samples" in last
    folder = tmp_path / ".rollyard" / "samples"
    assert list(folder.glob("run=*/*.parquet")) == []

    stop = asyncio.Event()

    async def written() -> int:
        while not list(folder.glob("run=*/*.parquet")):  # noqa: ASYNC110 - the sink writes them
            await asyncio.sleep(0.05)
        stop.set()
        return 0

    (code, said), _ = await asyncio.gather(program("sink", url=nats.url, folder=tmp_path, ended_by=stop), written())
    assert code == 0, said
    _, rows = query(folder, "select sample_id from samples order by sample_id")
    assert [row[0] for row in rows] == [f"s{index}" for index in range(6)]
