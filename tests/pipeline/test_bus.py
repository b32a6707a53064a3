from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rollyard.pipeline import bus as bus_module
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import WRITER_HEADER, Bus
from rollyard.pipeline.embedded import EmbeddedNats, nats_server
from rollyard.pipeline.follow import CaughtUp, follow
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.streams import Limits, ensure
from rollyard.schemas.errors import BlobError, BusError, BusFull, Conflict, TooLarge
from rollyard.schemas.fleet import Cancel


async def test_create_once_has_one_winner(bus: Bus) -> None:
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(bus.create("log.r.x.commit", str(i).encode())) for i in range(20)]
    outcomes = [task.result() for task in tries]
    assert sum(created for _, created in outcomes) == 1
    assert len({seq for seq, _ in outcomes}) == 1


async def test_compare_and_set_counts_every_winner(bus: Bus) -> None:
    bucket: Bucket[Cancel] = Bucket(bus, "cancel", Cancel)
    revision = await bucket.create("k", Cancel(at_ms=0))

    async def add_one() -> None:
        while True:
            found = await bucket.get("k")
            assert found is not None
            try:
                await bucket.update("k", Cancel(at_ms=found[0].at_ms + 1), found[1])
                return
            except Conflict:
                continue

    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(add_one())
    found = await bucket.get("k")
    assert found is not None
    assert found[0].at_ms == 10
    assert found[1] > revision


async def test_a_write_that_timed_out_but_was_stored_counts_as_ours(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the first try is lost on the way; the refusal of the second must not look like another's win."""
    real = bus.request
    lost = []

    async def lossy(subject: str, data: bytes = b"", **options: object) -> object:
        answer = await real(subject, data, **options)  # type: ignore[arg-type]
        if subject.startswith("log.") and not lost:
            lost.append(subject)
            raise BusError("the answer was lost")
        return answer

    monkeypatch.setattr(bus, "request", lossy)
    seq, created = await bus.create("log.r.x.commit", b"mine")
    assert lost
    assert created
    stored = await bus.last("log.r.x.commit")
    assert stored is not None
    assert (stored.seq, stored.data) == (seq, b"mine")
    assert stored.headers[WRITER_HEADER]


async def test_message_id_is_stored_once(bus: Bus) -> None:
    first = await bus.publish("stage.aggregate.r", b"a", msg_id="one")
    assert await bus.publish("stage.aggregate.r", b"a", msg_id="one") == first


async def test_large_bodies_go_by_the_blob_store(bus: Bus) -> None:
    body = os.urandom(bus_module.INLINE_MAX_BYTES + 1)
    seq = await bus.publish("log.r.x.call", body)
    stored = await bus.last("log.r.x.call")
    assert stored is not None
    assert stored.data == body
    assert [m.data async for m in bus.read("LOG", "log.r.>")] == [body]
    raw = await bus.api("STREAM.MSG.GET.LOG", {"seq": seq})
    assert "data" not in raw["message"]


async def test_headers_are_followed_without_bodies_and_blobs(bus: Bus) -> None:
    """Nothing is fetched: the reader of headers has no blob store."""
    await bus.create("log.r.x.call", b"z" * 700_000, headers={"Rollyard-Calls": "3"})
    await bus.create("log.r.y.call", b"body", headers={"Rollyard-Calls": "4"})
    bus.blobs = None
    flow = follow(bus, "LOG", "log.>", headers_only=True)
    read = [await anext(flow) for _ in range(2)]
    await flow.aclose()  # type: ignore[attr-defined]
    assert [(item.headers["Rollyard-Calls"], item.data) for item in read if isinstance(item, Stored)] == [
        ("3", b""),
        ("4", b""),
    ]


async def test_without_a_blob_store_large_bodies_are_refused(nats: EmbeddedNats) -> None:
    async with Bus.connect(nats.url, name="bare") as bare:
        await ensure(bare)
        with pytest.raises(TooLarge, match="blobs"):
            await bare.publish("log.r.x.call", b"x" * 600_000)


def test_damaged_and_missing_blobs_say_so(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    name = store.put(b"hello")
    assert store.get(name) == b"hello"
    (tmp_path / name[:2] / name).write_bytes(b"hellO")
    with pytest.raises(BlobError, match="damaged"):
        store.get(name)
    with pytest.raises(BlobError, match="cannot read"):
        store.get("0" * 64)
    with pytest.raises(BlobError, match="no blob name"):
        store.get("../../etc/passwd")


async def test_read_in_order_with_bounds(bus: Bus) -> None:
    for number in range(600):
        await bus.publish(f"log.r.{'a' if number % 2 else 'b'}.call", str(number).encode())
    seen = [int(m.data) async for m in bus.read("LOG", "log.r.a.call")]
    assert seen == list(range(1, 600, 2))
    window = [int(m.data) async for m in bus.read("LOG", "log.r.*.call", start_seq=11, until_seq=20)]
    assert window == list(range(10, 20))
    assert [m async for m in bus.read("LOG", "log.nobody.>")] == []


async def test_a_full_stream_is_told_apart(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "small") as server, Bus.connect(server.url, name="full") as small:
        await ensure(small, Limits(log_max_bytes=20_000))
        with pytest.raises(BusFull, match="room"):
            for _ in range(100):
                await small.publish("log.r.x.call", b"x" * 1000)


async def test_config_drift_is_reported_and_nothing_changed(bus: Bus) -> None:
    reports = await ensure(bus, Limits(log_max_bytes=1_000_000))
    assert len(reports) == 1
    assert "LOG" in reports[0]
    assert "max_bytes" in reports[0]


async def test_no_server_is_an_error_with_the_address() -> None:
    with pytest.raises(BusError, match=r"127\.0\.0\.1:1"):
        async with Bus.connect("nats://127.0.0.1:1", name="nobody", wait_s=0.3):
            pass


async def test_survives_a_killed_server(tmp_path: Path) -> None:
    """Everything acknowledged before and after a kill -9 is in the log, once."""
    acknowledged: list[int] = []
    async with nats_server(tmp_path / "n") as first:
        port = first.port
        async with Bus.connect(first.url, name="kill") as connection:
            await ensure(connection)

            async def write(numbers: range) -> None:
                for number in numbers:
                    await connection.publish("log.r.x.call", str(number).encode(), msg_id=f"m{number}")
                    acknowledged.append(number)

            await write(range(50))
            writer = asyncio.create_task(write(range(50, 150)))
            await asyncio.sleep(0)
            os.kill(first.pid, signal.SIGKILL)
            await first.process.wait()
            async with nats_server(tmp_path / "n", port):
                await writer
                stored = [int(m.data) async for m in connection.read("LOG", "log.r.>")]
    assert acknowledged == list(range(150))
    assert stored == acknowledged


async def test_follow_goes_on_after_a_killed_server(tmp_path: Path) -> None:
    seen: list[int] = []
    async with nats_server(tmp_path / "n") as first:
        port = first.port
        async with Bus.connect(first.url, name="follow") as connection:
            await ensure(connection)
            for number in range(10):
                await connection.publish("log.r.x.call", str(number).encode())
            caught_up = asyncio.Event()

            async def reader() -> None:
                async for item in follow(connection, "LOG", "log.>"):
                    if isinstance(item, CaughtUp):
                        caught_up.set()
                        continue
                    seen.append(int(item.data))
                    if len(seen) == 20:
                        return

            task = asyncio.create_task(reader())
            await caught_up.wait()
            assert seen == list(range(10))
            os.kill(first.pid, signal.SIGKILL)
            await first.process.wait()
            async with nats_server(tmp_path / "n", port):
                for number in range(10, 20):
                    await connection.publish("log.r.x.call", str(number).encode(), msg_id=f"n{number}")
                await task
    assert seen == list(range(20))


async def test_bucket_watch_sees_values_changes_and_deletes(bus: Bus) -> None:
    bucket: Bucket[Cancel] = Bucket(bus, "cancel", Cancel)
    await bucket.put("a", Cancel(reason="one"))
    seen: list[tuple[str, str | None]] = []
    changed = asyncio.Event()

    async def watch() -> None:
        async for key, value, _ in bucket.watch():
            seen.append((key, value.reason if value else None))
            changed.set()

    task = asyncio.create_task(watch())
    while ("", None) not in seen:
        await asyncio.wait_for(changed.wait(), 10)
        changed.clear()
    await bucket.put("b", Cancel(reason="two"))
    await bucket.delete("a")
    while ("a", None) not in seen:
        await asyncio.wait_for(changed.wait(), 10)
        changed.clear()
    task.cancel()
    assert seen == [("a", "one"), ("", None), ("b", "two"), ("a", None)]
    assert await bucket.get("a") is None
    assert [key async for key, _, _ in bucket.items()] == ["b"]
    assert await bucket.create("a", Cancel(reason="again"))
