from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import rollyard
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.embedded import EmbeddedNats, free_port
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, ConfigError, TaskError, WaitTimeout
from rollyard.schemas.fleet import Run
from rollyard.schemas.sample import Delivery, Group

T = TypeVar("T")
RUN = "sync"


async def deliver(bus: Bus, task: str, size: int) -> None:
    """What the aggregator does for a whole group."""
    for index in range(size):
        made = Delivery(
            run=RUN,
            task_id=task,
            group_id=task,
            group_size=size,
            rollout_id=subjects.rollout_id(RUN, task, index),
            index=index,
            attempt=1,
            status="failed",
        )
        await bus.create(subjects.sample_subject(RUN, task, index), encode(made))
    group = Group(run=RUN, task_id=task, group_id=task, size=size)
    await bus.create(subjects.group_subject(RUN, task), encode(group))


async def beside(work: Callable[[], T]) -> T:
    """Run what a plain program does in a thread; the test's own loop goes on."""
    return await asyncio.to_thread(work)


async def test_a_plain_program_does_everything(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    await deliver(bus, "a", 2)
    await deliver(bus, "b", 1)

    def program() -> None:
        with rollyard.connect_sync(nats.url, run=RUN, blobs=tmp_path / "blobs") as client:
            report = client.submit([{"prompt": "hello", "id": "t"}])
            assert report.task_ids == ("t",)
            with pytest.raises(TaskError, match="group_size"):
                client.submit({"prompt": "hello", "group_size": 0})
            batches = client.groups(ack="manual")
            assert [len(batch.deliveries) for _, batch in zip(range(2), batches, strict=False)] == [2, 1]
            assert batches.ack() == 2
            with client.deliveries() as deliveries:
                assert [next(deliveries).task_id for _ in range(3)] == ["a", "a", "b"]
            client.publish_policy_version(4)
            assert client.policy_version() == 4
            client.cancel("t", 0)
            assert client.status().delivered == 3
            with pytest.raises(WaitTimeout):
                client.wait(timeout_s=0.1)

    await beside(program)


async def test_it_works_where_a_loop_is_running_already(bus: Bus, nats: EmbeddedNats) -> None:
    """As in a notebook: the caller's thread has a running loop, which the client leaves alone."""
    client = rollyard.connect_sync(nats.url, run=RUN)
    try:
        assert client.status().run == RUN
    finally:
        client.close()
    client.close()


async def test_a_closed_client_says_so(bus: Bus, nats: EmbeddedNats) -> None:
    client = rollyard.connect_sync(nats.url, run=RUN)
    reader = client.samples()
    client.close()
    for call in (client.status, lambda: next(reader), reader.ack):
        with pytest.raises(BusError, match="the client is closed"):
            call()


async def test_a_waiting_reader_ends_when_the_client_closes(bus: Bus, nats: EmbeddedNats) -> None:
    client = rollyard.connect_sync(nats.url, run=RUN)
    reader = client.deliveries()

    def wait_for_one() -> str:
        with pytest.raises(BusError) as caught:
            next(reader)
        return caught.value.message

    waiting = asyncio.create_task(beside(wait_for_one))
    await asyncio.sleep(0.3)
    await beside(client.close)
    assert "closed" in await waiting


async def test_errors_of_connecting_reach_the_caller(nats: EmbeddedNats) -> None:
    with pytest.raises(BusError, match=r"rollyard up"):
        await beside(lambda: rollyard.connect_sync(f"nats://127.0.0.1:{free_port()}", run=RUN))
    with pytest.raises(BusError, match="streams are not there"):
        await beside(lambda: rollyard.connect_sync(nats.url, run=RUN))
    with pytest.raises(ConfigError, match="name the run"):
        await beside(lambda: rollyard.connect_sync(nats.url, run=""))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollyard-")]


async def test_ctrl_c_while_waiting_loses_nothing(bus: Bus, nats: EmbeddedNats) -> None:
    """SIGINT reaches the main thread, so this test calls from it."""
    client = rollyard.connect_sync(nats.url, run=RUN)
    try:
        reader = client.deliveries()
        main = threading.main_thread().ident
        assert main is not None
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                next(reader)
        finally:
            signal.signal(signal.SIGINT, before)
            timer.join()
        await deliver(bus, "late", 2)
        assert [next(reader).index for _ in range(2)] == [0, 1]
    finally:
        client.close()


async def test_an_item_that_was_handed_out_but_not_received_comes_again(bus: Bus, nats: EmbeddedNats) -> None:
    await deliver(bus, "t", 2)
    async with rollyard.connect(nats.url, run=RUN) as client:
        reader = client.deliveries()
        assert (await reader.item(1)).index == 0
        assert (await reader.item(1)).index == 0
        assert (await reader.item(2)).index == 1


async def test_the_pool_of_model_servers_from_a_plain_program(bus: Bus, nats: EmbeddedNats) -> None:
    def program() -> None:
        with rollyard.connect_sync(nats.url, run=RUN) as client:
            client.add_server(server_id="s1", url="http://127.0.0.1:1", engine="vllm")
            client.add_server(rollyard.LlmServer(server_id="s2", url="http://127.0.0.1:2", engine="sglang"))
            client.set_server_version("s1", 4)
            client.pause_server("s1")
            client.drain_server("s2", timeout_s=5)
            found = [(server.server_id, server.state, server.policy_version) for server in client.servers()]
            assert found == [("s1", "paused", 4), ("s2", "draining", None)]
            client.resume_server("s1")
            client.remove_server("s2")
            client.set_models({"*haiku*": "small"})
            client.set_models({"*opus*": "large"})
            assert [server.state for server in client.servers()] == ["serving"]
            with pytest.raises(BusError, match="no gateway runs that could update weights"):
                client.update_weights(5, checkpoint="/checkpoints/5", how="abort")
            with pytest.raises(ConfigError, match="no server 's2' is in the pool"):
                client.swap_server("s2", rollyard.LlmServer(server_id="s3", url="http://x", engine="vllm"))

    await beside(program)
    [run] = [run async for _, run, _ in Bucket[Run](bus, subjects.RUNS, Run).items()]
    assert (run.run, run.models) == (RUN, {"*opus*": "large"})
