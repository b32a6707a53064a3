"""Blobs that something refers to stay, whatever it is; the others go when nobody has put them for long."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.pipeline import contents as contents_module
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.sweep import Sweep, Swept
from rollyard.schemas import subjects
from rollyard.schemas.call import CallIntent
from rollyard.schemas.errors import ArchiveError, BlobError, TooNew
from rollyard.schemas.fleet import DeadLetter
from rollyard.schemas.rollout import AgentResult, Artifact, Rollout, RolloutEvent
from rollyard.schemas.sample import Delivery
from rollyard.schemas.task import Task

OLD = 1_000_000_000


def noise(seed: int) -> str:
    """More than goes inline, also compressed."""
    return random.Random(seed).randbytes(700_000).hex()


def age(bus: Bus, but: Collection[str] = ()) -> None:
    """Make every blob an old one, but for some."""
    for name in there(bus) - set(but):
        with suppress(FileNotFoundError):
            os.utime(folder(bus) / name[:2] / name, (OLD, OLD))


def folder(bus: Bus) -> Path:
    assert bus.blobs is not None
    return bus.blobs.folder


def there(bus: Bus) -> set[str]:
    assert bus.blobs is not None
    return set(bus.blobs.names())


def put(bus: Bus, data: bytes) -> str:
    assert bus.blobs is not None
    return bus.blobs.put(data)


def intent(**fields: Any) -> CallIntent:
    who: dict[str, Any] = {"call_id": "c", "run": "r", "rollout_id": "x", "attempt": 1, "gateway": "g"}
    return CallIntent(**who, at_ms=0, latest_end_ms=0, **fields)


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"blob:{name}", "media_type": "image/png"}}


async def test_everything_that_something_refers_to_stays(bus: Bus, tmp_path: Path) -> None:
    free = {put(bus, b"nobody's"), put(bus, b"nobody's either")}
    log, samples = subjects.log_subject("r", "x", "call"), tmp_path / "samples"
    whole = put(bus, b"an image")
    await bus.publish(log, encode(intent(messages=[{"role": "user", "content": [image(whole)]}])))
    inner = put(bus, b"an image inside of a system prompt")
    system = {"role": "system", "content": [image(inner), {"type": "text", "text": "long " * 999}]}
    await bus.publish(log, encode(await bus.contents.take_out(intent(messages=[system], tools=[{"a": "b" * 4000}]))))
    await bus.publish(log, encode(intent(prompt=noise(1))))
    await bus.publish(subjects.task_subject("r"), encode(Task(prompt=noise(2))))
    await Bucket[Task](bus, subjects.TASK_BUCKET, Task).put("r.t.body", Task(prompt=noise(3)))
    await bus.publish(
        subjects.dead_subject("run", "r"),
        encode(DeadLetter(stage="run", run="r", subject="s", reason="r", body=bytes.fromhex(noise(4)))),
    )
    of_a_sample = put(bus, b"an image of a delivery")
    facts: dict[str, Any] = {"run": "r", "task_id": "t", "group_id": "t", "group_size": 1, "rollout_id": "x"}
    delivery = Delivery(**facts, index=0, attempt=1, status="failed", metadata={"messages": [image(of_a_sample)]})
    await bus.publish(subjects.sample_subject("r", "t", 0), encode(delivery))
    in_parquet = put(bus, b"an image of a row")
    (samples / "run=r").mkdir(parents=True)
    rows = pa.table({"messages": [None, f'[{{"url": "blob:{in_parquet}"}}]', "[]"]})
    pq.write_table(rows, samples / "run=r" / "part-1-2.parquet")
    saved = put(bus, b"a file that an agent left")
    result = AgentResult(exit_code=0, artifacts=(Artifact(name="out.txt", blob=saved, size_bytes=25),))
    rollout = Rollout.of("r", "t", 0, 1)
    ran = RolloutEvent(kind="ran", rollout=rollout, attempt=1, at_ms=1, result=result)
    await bus.publish(subjects.log_subject("r", rollout.rollout_id, "life"), encode(ran))
    kept = there(bus) - free
    assert len(kept) == 11
    age(bus)

    size = len(b"nobody's") + len(b"nobody's either")
    assert await Sweep(bus, samples).run(dry_run=True) == Swept(blobs=2, bytes=size)
    assert there(bus) == kept | free
    assert await Sweep(bus, samples).run() == Swept(blobs=2, bytes=size)
    assert there(bus) == kept
    assert await Sweep(bus, samples).run() == Swept()

    await bus.api("STREAM.PURGE.LOG")
    assert (await Sweep(bus, samples).run()).blobs == 6
    for stream, left in (("TASKS", 4), ("KV_tasks", 3), ("DEAD", 2), ("SAMPLES", 1)):
        await bus.api(f"STREAM.PURGE.{stream}")
        await Sweep(bus, samples).run()
        assert len(there(bus)) == left
    assert there(bus) == {in_parquet}


async def test_what_was_put_within_the_hour_stays(bus: Bus, tmp_path: Path) -> None:
    first, second = put(bus, b"first"), put(bus, b"second")
    assert await Sweep(bus, tmp_path).run() == Swept()
    age(bus)
    # It is there already: whoever puts it again is about to name it.
    assert put(bus, b"second") == second
    assert await Sweep(bus, tmp_path).run() == Swept(blobs=1, bytes=5)
    assert there(bus) == {second}
    assert put(bus, b"first") == first
    assert there(bus) == {first, second}


async def test_what_is_put_while_the_sweep_looks_stays(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        put(bus, b"blob %d" % number)
    await bus.publish(subjects.log_subject("r", "x", "life"), b"\x80")
    age(bus)
    sweep = Sweep(bus, tmp_path)
    looked = sweep._keep

    def put_one(stored: Any, old: dict[str, int]) -> None:
        put(bus, b"blob 1")
        looked(stored, old)

    monkeypatch.setattr(sweep, "_keep", put_one)
    assert (await sweep.run()).blobs == 2
    assert there(bus) == {put(bus, b"blob 1")}


async def test_a_part_that_a_process_has_long_known_is_put_again(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = intent(tools=[{"a": "b" * 4000}])
    contents, reader = Contents(bus.blobs), Contents(bus.blobs)
    taken = await contents.take_out(whole)
    age(bus)
    # Another process has only read it: it puts it before it names it.
    assert reader.put_back(taken) == whole
    assert await reader.take_out(whole) == taken
    assert await Sweep(bus, tmp_path).run() == Swept()
    age(bus)
    assert await contents.take_out(whole) == taken
    assert (await Sweep(bus, tmp_path).run(dry_run=True)).blobs == 1
    monkeypatch.setattr(contents_module, "PUT_AGAIN_S", -1.0)
    assert await contents.take_out(whole) == taken
    assert (await Sweep(bus, tmp_path).run(dry_run=True)).blobs == 0


async def test_what_cannot_be_read_ends_the_sweep_before_it_removes(bus: Bus, tmp_path: Path) -> None:
    put(bus, b"free")
    age(bus)
    (tmp_path / "run=r").mkdir()
    bad = tmp_path / "run=r" / "part-1-2.parquet"
    bad.write_bytes(b"PAR1")
    with pytest.raises(ArchiveError, match=r"part-1-2\.parquet cannot be read.*no blob was removed"):
        await Sweep(bus, tmp_path).run()
    bad.unlink()
    seq = await bus.publish(subjects.log_subject("r", "x", "call"), encode(intent(schema_version=99)))
    with pytest.raises(TooNew):
        await Sweep(bus, tmp_path).run()
    await bus.api("STREAM.PURGE.LOG", {"seq": seq + 1})
    await bus.publish(subjects.log_subject("r", "x", "call"), encode(intent(prompt=noise(1))))
    (lost,) = there(bus) - {put(bus, b"free")}
    age(bus)
    (folder(bus) / lost[:2] / lost).unlink()
    with pytest.raises(BlobError, match=f"cannot read blob {lost}"):
        await Sweep(bus, tmp_path).run()
    assert len(there(bus)) == 1


async def test_removals_and_writes_that_died_are_tidied_up(bus: Bus, tmp_path: Path) -> None:
    used, free = put(bus, b"an image"), put(bus, b"free")
    await bus.publish(subjects.log_subject("r", "x", "call"), f"blob:{used}".encode())
    for name in (used, free):
        path = folder(bus) / name[:2] / name
        path.rename(path.with_name(f".leaving-{name}-0011"))
    half = folder(bus) / used[:2] / f".{used[:16]}-0011"
    young = folder(bus) / used[:2] / f".{used[:16]}-2233"
    for path in (half, young):
        path.write_bytes(b"half")
    for path in folder(bus).rglob(".*"):
        if path != young:
            os.utime(path, (OLD, OLD))
    assert await Sweep(bus, tmp_path).run() == Swept()
    assert there(bus) == {used, free}
    age(bus)
    assert await Sweep(bus, tmp_path).run() == Swept(blobs=1, bytes=4)
    assert {path.name for path in folder(bus).rglob("*") if path.is_file()} == {used, young.name}


async def test_several_sweeps_and_writers_at_once_lose_nothing(bus: Bus, tmp_path: Path) -> None:
    """Blobs that are put and then named, over and over, while two sweeps remove what is not named."""
    bodies = [b"body %d" % number for number in range(20)]
    named: set[str] = set()
    for body in bodies:
        put(bus, body)

    async def write() -> None:
        for round_ in range(15):
            age(bus, but=named)
            for body in bodies[round_::15]:
                name = await asyncio.to_thread(put, bus, body)
                await bus.publish(subjects.log_subject("r", "x", "call"), f"blob:{name}".encode())
                named.add(name)

    async def sweep() -> None:
        for _ in range(15):
            await Sweep(bus, tmp_path).run()

    async with asyncio.TaskGroup() as group:
        for work in (write, sweep, sweep):
            group.create_task(work())
    await Sweep(bus, tmp_path).run()
    assert there(bus) >= named
    assert len(named) == 20


def test_a_blob_of_somebody_else_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    name = store.put(b"theirs")
    path = tmp_path / name[:2] / name
    os.utime(path, (OLD, OLD))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refuse)
        assert store.put(b"theirs") == name
    assert path.stat().st_mtime > OLD
    assert store.get(name) == b"theirs"
