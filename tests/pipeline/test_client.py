from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollyard
from rollyard.pipeline import reader as reader_module
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.client import Client
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.embedded import EmbeddedNats, free_port, nats_server
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.taskfile import decode_task
from rollyard.schemas import subjects
from rollyard.schemas.errors import (
    BusError,
    BusFull,
    ConfigError,
    Conflict,
    RollyardError,
    TaskError,
    WaitTimeout,
)
from rollyard.schemas.fleet import Cancel, DeadLetter, PolicyVersion, Run
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Delivery, Group, Sample
from rollyard.schemas.task import Task, TaskProgress

RUN = "run 1"
ACK_WAIT_S = 2.0


def sample(task: str, index: int, branch: int, branches: int) -> Sample:
    return Sample(
        sample_id=f"{task}-{index}-{branch}",
        run=RUN,
        task_id=task,
        group_id=task,
        rollout_id=subjects.rollout_id(RUN, task, index),
        index=index,
        attempt=1,
        branch=branch,
        branches=branches,
        scenario="main",
        status="completed",
        token_ids=TokenIds.of([1, 2, 3]),
        loss_mask=LossMask.of([0, 1, 1]),
        logprobs=Logprobs.of([0.0, -0.5, -0.25]),
        policy_versions=Versions.of([-1, 0, 0]),
        reward=float(index % 2),
    )


def delivery(task: str, index: int, *, size: int = 1, samples: int = 1, answer: str = "") -> Delivery:
    return Delivery(
        run=RUN,
        task_id=task,
        group_id=task,
        group_size=size,
        rollout_id=subjects.rollout_id(RUN, task, index),
        index=index,
        attempt=1,
        status="completed" if samples else "failed",
        reward=float(index % 2),
        answer=answer,
        samples=tuple(sample(task, index, branch, samples) for branch in range(samples)),
    )


async def deliver(bus: Bus, made: Delivery) -> int:
    """What the aggregator does with a finished rollout."""
    seq, created = await bus.create(subjects.sample_subject(made.run, made.group_id, made.index), encode(made))
    assert created
    return seq


async def close_group(bus: Bus, run: str, task: str, size: int, first_seq: int = 0) -> None:
    """What the aggregator does with the last rollout of a group."""
    group = Group(run=run, task_id=task, group_id=task, size=size, first_seq=first_seq)
    await bus.create(subjects.group_subject(run, task), encode(group))
    bucket = Bucket[TaskProgress](bus, subjects.TASK_BUCKET, TaskProgress)
    key = subjects.task_key(run, task)
    found = await bucket.get(key)
    content = found[0].content_hash if found else "?"
    await bucket.put(key, TaskProgress(content_hash=content, group_size=size, progress="closed", task_id=task, run=run))


async def accept(bus: Bus, task: Task) -> None:
    """What admit does first with a task."""
    progress = TaskProgress(
        content_hash=task.content_hash(), group_size=task.group_size, task_id=task.id, run=RUN, progress="fanned_out"
    )
    await Bucket[TaskProgress](bus, subjects.TASK_BUCKET, TaskProgress).put(subjects.task_key(RUN, task.id), progress)


async def published(bus: Bus) -> list[Task]:
    state = (await bus.stream_info(subjects.TASKS))["state"]
    stored = [await bus.get(subjects.TASKS, seq) for seq in range(max(1, state["first_seq"]), state["last_seq"] + 1)]
    return [decode_task(message.data) for message in stored if message is not None]


async def take(reader: Any, count: int) -> list[Any]:
    return [await anext(reader) for _ in range(count)]


async def held_by_server(bus: Bus, name: str) -> tuple[int, int]:
    """(messages delivered and not acknowledged, messages not delivered yet) of a durable name."""
    info = await bus.api(f"CONSUMER.INFO.SAMPLES.trainer-{subjects.token(RUN)}-{name}")
    return info["num_ack_pending"], info["num_pending"]


@pytest.fixture
async def client(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> AsyncIterator[Client]:
    async with rollyard.connect(nats.url, run=RUN, blobs=tmp_path / "blobs", ack_wait_s=ACK_WAIT_S) as connected:
        yield connected


# --- connecting ---


async def test_no_server_is_told_with_its_url_and_the_command_that_mends_it() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusError, match=rf"cannot reach NATS at {url}.*rollyard up"):
        async with rollyard.connect(url, run=RUN):
            pass


async def test_a_server_without_our_streams_is_told_apart(nats: EmbeddedNats) -> None:
    with pytest.raises(BusError, match=r"Rollyard's streams are not there.*rollyard up"):
        async with rollyard.connect(nats.url, run=RUN):
            pass


async def test_the_url_comes_from_the_environment(
    bus: Bus, nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLYARD_NATS_URL", nats.url)
    async with rollyard.connect(run=RUN) as connected:
        assert (await connected.status()).delivered == 0


@pytest.mark.parametrize("run", ["", "x" * 257])
async def test_a_run_needs_a_name(run: str) -> None:
    with pytest.raises(ConfigError, match="1 to 256 characters"):
        async with rollyard.connect(run=run):
            pass


# --- submitting ---


async def test_submit_publishes_each_task_once_in_every_form(bus: Bus, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "from a file", "id": "f"}\n')
    report = await client.submit([Task(prompt="a", id="a"), {"prompt": "b", "id": "b"}, {"prompt": "b", "id": "b"}])
    assert (report.accepted, report.repeated, report.task_ids) == (2, 1, ("a", "b"))
    assert (await client.submit(path)).task_ids == ("f",)
    assert (await client.submit(str(path))).repeated == 1
    single = await client.submit({"prompt": "c"})
    assert single.task_ids == (Task(prompt="c").with_id().id,)
    assert sorted(task.prompt for task in await published(bus)) == ["a", "b", "c", "from a file"]


async def test_submit_announces_the_run_by_its_name_once(bus: Bus, client: Client) -> None:
    runs = Bucket[Run](bus, subjects.RUNS, Run)
    for number in range(2):
        await client.submit(Task(prompt=f"prompt {number}"))
        found = await runs.get(subjects.token(RUN))
        assert found is not None
        assert found[0].run == RUN
        assert found[1] == 1


async def test_a_bad_task_stops_the_whole_submission(bus: Bus, client: Client, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="task 2: group_size: must be an integer >= 1, is 0"):
        await client.submit([{"prompt": "a"}, {"prompt": "b", "group_size": 0}])
    with pytest.raises(TaskError, match="'x' is refused"):
        await client.submit([{"prompt": "a"}], check=lambda task: ["harness: 'x' is refused"])
    with pytest.raises(TaskError, match="cannot submit a int"):
        await client.submit(3)  # type: ignore[arg-type]
    assert await published(bus) == []


@pytest.mark.parametrize("count", [1, 300])
async def test_a_task_that_the_run_has_is_not_published_again(bus: Bus, client: Client, count: int) -> None:
    tasks = [Task(prompt=f"prompt {number}", id=f"t{number}") for number in range(count)]
    for task in tasks:
        await accept(bus, task)
    report = await client.submit([*tasks, Task(prompt="new", id="new")])
    assert (report.accepted, report.repeated) == (1, count)
    assert [task.id for task in await published(bus)] == ["new"]


@pytest.mark.parametrize("count", [1, 300])
async def test_an_id_with_other_content_is_refused_before_anything_is_published(
    bus: Bus, client: Client, count: int
) -> None:
    await accept(bus, Task(prompt="old", id="t0"))
    with pytest.raises(TaskError, match="has other content under 't0'; nothing was submitted"):
        await client.submit([Task(prompt="new", id=f"t{number}") for number in range(count)])
    assert await published(bus) == []


async def test_an_id_that_this_client_used_with_other_content_is_refused(bus: Bus, client: Client) -> None:
    await client.submit(Task(prompt="a", id="t"))
    with pytest.raises(TaskError, match="other content under 't'"):
        await client.submit(Task(prompt="b", id="t"))
    assert len(await published(bus)) == 1


async def test_a_trainer_that_starts_again_publishes_no_task_twice(
    bus: Bus, client: Client, nats: EmbeddedNats
) -> None:
    await client.submit(Task(prompt="a", id="t"))
    async with rollyard.connect(nats.url, run=RUN) as again:
        await again.submit(Task(prompt="a", id="t"))
    assert len(await published(bus)) == 1


async def test_a_large_task_travels_as_a_blob(bus: Bus, client: Client) -> None:
    noise = "".join(chr(0x4E00 + (number * 7919) % 20000) for number in range(600_000))
    await client.submit(Task(prompt=noise, id="large"))
    assert [task.prompt for task in await published(bus)] == [noise]


async def test_a_full_stream_says_how_far_it_came_and_what_to_do(bus: Bus, client: Client) -> None:
    config = (await bus.stream_info(subjects.TASKS))["config"] | {"max_bytes": 3000}
    await bus.api(f"STREAM.UPDATE.{subjects.TASKS}", config)
    with pytest.raises(BusFull, match=r"\d+ of 200 tasks were published.*submit the same tasks again"):
        await client.submit([Task(prompt=f"prompt {number}", id=f"t{number}") for number in range(200)])


# --- reading ---


async def test_asking_for_the_next_delivery_acknowledges_the_last(bus: Bus, client: Client) -> None:
    for index in range(3):
        await deliver(bus, delivery("t", index, size=3))
    reader = client.deliveries()
    assert [made.index for made in await take(reader, 2)] == [0, 1]
    assert await held_by_server(bus, "default") == (2, 0)
    await reader.close()
    assert sorted(made.index for made in await take(client.deliveries(), 2)) == [1, 2]


async def test_manual_ack_covers_everything_handed_out(bus: Bus, client: Client) -> None:
    for index in range(4):
        await deliver(bus, delivery("t", index, size=4))
    reader = client.deliveries(ack="manual")
    await take(reader, 2)
    assert await reader.ack() == 2
    assert await reader.ack() == 0
    await take(reader, 1)
    await reader.close()
    assert sorted(made.index for made in await take(client.deliveries(), 2)) == [2, 3]


async def test_durable_names_are_independent_and_runs_apart(bus: Bus, client: Client) -> None:
    await deliver(bus, delivery("t", 0))
    other = msgspec.structs.replace(delivery("t", 0), run="another")
    await deliver(bus, other)
    one, two = client.deliveries(durable="one", ack="manual"), client.deliveries(durable="two: ü")
    assert (await anext(one)).run == (await anext(two)).run == RUN
    await one.ack()
    assert await held_by_server(bus, "one") == (0, 0)


async def test_two_readers_of_one_name_share_the_work(bus: Bus, client: Client, nats: EmbeddedNats) -> None:
    for index in range(40):
        await deliver(bus, delivery("t", index, size=40))
    seen: list[int] = []
    all_seen = asyncio.Event()

    async def read_all(reader: rollyard.Reader[Delivery]) -> None:
        async for made in reader:
            seen.append(made.index)
            if len(seen) == 40:
                all_seen.set()

    async with rollyard.connect(nats.url, run=RUN) as second:
        tasks = [asyncio.create_task(read_all(one.deliveries())) for one in (client, second)]
        await all_seen.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert sorted(seen) == list(range(40))


async def test_new_deliveries_arrive_while_the_reader_waits(bus: Bus, client: Client) -> None:
    waiting = asyncio.create_task(take(client.deliveries(), 2))
    for index in range(2):
        await deliver(bus, delivery("t", index, size=2))
    assert [made.index for made in await waiting] == [0, 1]


async def test_samples_are_flat_and_a_delivery_is_acknowledged_with_its_last(bus: Bus, client: Client) -> None:
    for index, samples in enumerate((0, 2, 0, 1)):
        await deliver(bus, delivery("t", index, size=4, samples=samples))
    reader = client.samples(ack="manual")
    first = await anext(reader)
    assert (first.sample_id, first.token_ids, first.loss_mask.tolist()) == ("t-1-0", TokenIds.of([1, 2, 3]), [0, 1, 1])
    assert await reader.ack() == 1  # the delivery without samples; the other has one left
    assert (await anext(reader)).sample_id == "t-1-1"
    assert (await anext(reader)).sample_id == "t-3-0"
    await reader.close()
    again = client.samples()
    assert sorted(one.sample_id for one in await take(again, 3)) == ["t-1-0", "t-1-1", "t-3-0"]


async def test_a_cancelled_wait_loses_nothing(bus: Bus, client: Client) -> None:
    reader = client.deliveries()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(reader), 0.3)
    await deliver(bus, delivery("t", 0))
    assert (await anext(reader)).index == 0


async def test_held_deliveries_are_kept_by_heartbeats(bus: Bus, client: Client, nats: EmbeddedNats) -> None:
    await deliver(bus, delivery("t", 0))
    reader = client.deliveries(ack="manual")
    await anext(reader)
    async with rollyard.connect(nats.url, run=RUN, ack_wait_s=ACK_WAIT_S) as second:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(second.deliveries()), ACK_WAIT_S * 1.8)
    assert await reader.ack() == 1
    assert await held_by_server(bus, "default") == (0, 0)


CRASH = """
import asyncio, os, sys
import rollyard

async def main():
    async with rollyard.connect(sys.argv[1], run=sys.argv[2], ack_wait_s=2) as client:
        reader = client.deliveries()
        for _ in range(3):
            print((await anext(reader)).index, flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_after_kill_9_exactly_the_unacknowledged_come_again(bus: Bus, client: Client, nats: EmbeddedNats) -> None:
    for index in range(6):
        await deliver(bus, delivery("t", index, size=6))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CRASH, nats.url, RUN, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.split() == [b"0", b"1", b"2"]
    assert process.returncode == -9
    assert sorted(made.index for made in await take(client.deliveries(), 4)) == [2, 3, 4, 5]
    assert await held_by_server(bus, "default") == (1, 0)


async def test_a_reader_survives_a_killed_server(bus: Bus, client: Client, nats: EmbeddedNats, tmp_path: Path) -> None:
    for index in range(4):
        await deliver(bus, delivery("t", index, size=6))
    reader = client.deliveries(ack="manual")
    assert [made.index for made in await take(reader, 2)] == [0, 1]
    os.kill(nats.pid, signal.SIGKILL)
    await nats.process.wait()
    async with nats_server(tmp_path / "nats", nats.port):
        assert [made.index for made in await take(reader, 2)] == [2, 3]
        assert await reader.ack() == 4
        for index in range(4, 6):
            await deliver(bus, delivery("t", index, size=6))
        assert [made.index for made in await take(reader, 2)] == [4, 5]
        await reader.ack()
        assert await held_by_server(bus, "default") == (0, 0)


async def test_a_name_in_use_for_something_else_is_refused(bus: Bus, client: Client) -> None:
    await deliver(bus, delivery("t", 0))
    await anext(client.deliveries(durable="x-groups"))
    with pytest.raises(ConfigError, match=r"is used for sample\..* and cannot be used for group\."):
        await anext(client.groups(durable="x"))


async def test_a_deleted_name_is_an_error_and_not_a_fresh_start(bus: Bus, client: Client) -> None:
    await deliver(bus, delivery("t", 0))
    reader = client.deliveries(durable="gone")
    await anext(reader)
    await bus.api(f"CONSUMER.DELETE.SAMPLES.trainer-{subjects.token(RUN)}-gone")
    with pytest.raises(RollyardError, match="was deleted while it was read"):
        await anext(reader)


async def test_an_unreadable_delivery_is_named_and_stays_the_next(bus: Bus, client: Client) -> None:
    await bus.publish(subjects.sample_subject(RUN, "t", 0), b'{"schema_version": 99}')
    reader = client.deliveries()
    for _ in range(2):
        with pytest.raises(rollyard.DecodeError, match=r"sample\..*sequence 1: .*schema version 99"):
            await anext(reader)


async def test_what_is_held_without_ack_is_bounded(bus: Bus, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_HELD", 3)
    for index in range(5):
        await deliver(bus, delivery("t", index, size=5))
    reader = client.deliveries(ack="manual")
    await take(reader, 3)
    with pytest.raises(RollyardError, match=r"3 messages of .* are held.*call ack\(\)"):
        await anext(reader)
    assert await held_by_server(bus, "default") == (3, 2)
    await reader.ack()
    assert [made.index for made in await take(reader, 2)] == [3, 4]


async def test_a_large_delivery_comes_from_the_blob_store(bus: Bus, client: Client) -> None:
    large = msgspec.structs.replace(sample("t", 0, 0, 1), token_ids=TokenIds(os.urandom(800_000)))
    await deliver(bus, msgspec.structs.replace(delivery("t", 0), samples=(large,)))
    await close_group(bus, RUN, "t", 1)
    assert await anext(client.samples()) == large
    assert (await anext(client.groups())).deliveries[0].samples == (large,)


async def test_an_unknown_way_to_acknowledge_is_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="choose 'next' or 'manual'"):
        client.samples(ack="auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot name a run or a reader"):
        client.samples(durable="")


async def test_a_closed_reader_says_so(bus: Bus, client: Client) -> None:
    reader = client.deliveries()
    waiting = asyncio.create_task(anext(reader))
    await asyncio.sleep(0.1)
    await reader.close()
    with pytest.raises(BusError, match="is closed"):
        await waiting
    with pytest.raises(BusError, match="is closed"):
        await anext(reader)


# --- groups ---


async def test_only_complete_groups_come_ordered_by_index(bus: Bus, client: Client) -> None:
    first = 0
    for index in (2, 0, 1):
        seq = await deliver(bus, delivery("done", index, size=3))
        first = first or seq
        await deliver(bus, delivery("open", index, size=4))
    await close_group(bus, RUN, "done", 3, first)
    await deliver(bus, delivery("single", 0))
    await close_group(bus, RUN, "single", 1)
    reader = client.groups(ack="manual")
    batches = await take(reader, 2)
    assert [(batch.group.group_id, [made.index for made in batch.deliveries]) for batch in batches] == [
        ("done", [0, 1, 2]),
        ("single", [0]),
    ]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(reader), 0.3)
    await deliver(bus, delivery("open", 3, size=4))
    await close_group(bus, RUN, "open", 4)
    assert len((await anext(reader)).deliveries) == 4
    assert await reader.ack() == 3


async def test_groups_go_on_after_the_last_acknowledged(bus: Bus, client: Client) -> None:
    for task in ("a", "b", "c"):
        await deliver(bus, delivery(task, 0))
        await close_group(bus, RUN, task, 1)
    reader = client.groups()
    assert [batch.group.task_id for batch in await take(reader, 2)] == ["a", "b"]
    await reader.close()
    assert {batch.group.task_id for batch in await take(client.groups(), 2)} == {"b", "c"}


async def test_a_group_whose_deliveries_were_trimmed_is_an_error(bus: Bus, client: Client) -> None:
    await deliver(bus, delivery("t", 0, size=2))
    await deliver(bus, delivery("t", 1, size=2))
    await close_group(bus, RUN, "t", 2)
    await bus.api("STREAM.PURGE.SAMPLES", {"seq": 2})
    with pytest.raises(BusError, match="group 't' has 1 of its 2 deliveries left in SAMPLES"):
        await anext(client.groups())


# --- cancel, policy, status, wait ---


async def test_cancel_writes_what_the_workers_watch(bus: Bus, client: Client) -> None:
    await client.cancel("t", 3, reason="too old")
    await client.cancel("t")
    await client.cancel()
    entries = {key: value async for key, value, _ in Bucket[Cancel](bus, subjects.CANCEL, Cancel).items()}
    assert set(entries) == {
        subjects.cancel_key(RUN, "t", 3),
        subjects.cancel_key(RUN, "t"),
        subjects.cancel_key(RUN),
    }
    found = entries[subjects.cancel_key(RUN, "t", 3)]
    assert found.reason == "too old"
    assert found.at_ms > 0


async def test_cancel_of_an_index_needs_its_task(client: Client) -> None:
    with pytest.raises(TaskError, match="task_id and an index"):
        await client.cancel(index=1)
    with pytest.raises(TaskError, match="index from 0"):
        await client.cancel("t", -1)
    with pytest.raises(TaskError, match="1 to 256 characters"):
        await client.cancel("")


async def test_a_policy_version_goes_up_unless_forced(bus: Bus, client: Client) -> None:
    assert await client.policy_version() is None
    for version in (0, 3, 3):
        await client.publish_policy_version(version)
    with pytest.raises(Conflict, match=r"policy version 2 of run 'run 1' is below 3.*force=True"):
        await client.publish_policy_version(2)
    assert await client.policy_version() == 3
    await client.publish_policy_version(2, force=True)
    found = await Bucket[PolicyVersion](bus, subjects.POLICY, PolicyVersion).get(subjects.token(RUN))
    assert found is not None
    assert (found[0].run, found[0].version) == (RUN, 2)


@pytest.mark.parametrize("version", [-1, 2**31, 1.5, True, "1"])
async def test_a_policy_version_is_a_small_integer(client: Client, version: Any) -> None:
    with pytest.raises(ConfigError, match="an integer from 0"):
        await client.publish_policy_version(version)


async def test_policy_versions_announced_at_once_end_with_the_highest(client: Client) -> None:
    async def announce(version: int) -> None:
        try:
            await client.publish_policy_version(version)
        except Conflict:
            assert version < 9

    async with asyncio.TaskGroup() as group:
        for version in range(10):
            group.create_task(announce(version))
    assert await client.policy_version() == 9


async def test_wait_returns_when_the_submitted_tasks_are_closed(bus: Bus, client: Client) -> None:
    await client.wait(timeout_s=5)
    await client.submit([Task(prompt="a", id="a"), Task(prompt="b", id="b")])
    await close_group(bus, RUN, "a", 1)
    waiting = asyncio.create_task(client.wait(timeout_s=60))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await close_group(bus, RUN, "b", 1)
    await waiting
    await client.wait(["a"], timeout_s=60)


async def test_wait_names_what_is_not_closed_in_time(client: Client) -> None:
    await client.submit([Task(prompt="a", id=f"t{number}") for number in range(8)])
    with pytest.raises(WaitTimeout, match=r"8 of 8 tasks of run 'run 1' are not closed after 0.2 s: 't0'.*and 3 more"):
        await client.wait(timeout_s=0.2)


async def test_wait_ends_when_admit_refuses_a_task(bus: Bus, client: Client) -> None:
    async def refuse(task: Task, reason: str) -> None:
        letter = DeadLetter(stage="admit", run=RUN, subject="task.x", reason=reason, body=encode(task))
        await bus.publish(subjects.dead_subject("admit", RUN), encode(letter))

    task = Task(prompt="a", id="t")
    await refuse(task, "before it was submitted")
    await client.submit(task)
    await refuse(Task(prompt="other", id="t"), "somebody else's")
    waiting = asyncio.create_task(client.wait(timeout_s=60))
    await refuse(task, "agent.harness: 'x' is unknown")
    with pytest.raises(TaskError, match=r"task 't' was refused: agent.harness: 'x' is unknown"):
        await waiting
    assert (await client.submit(task)).accepted == 1


async def test_status_counts_what_was_delivered(bus: Bus, client: Client) -> None:
    await accept(bus, Task(prompt="a", id="t", group_size=2))
    await client.submit(Task(prompt="b", id="u"))
    await deliver(bus, delivery("t", 0, size=2))
    status = await client.status()
    assert (status.tasks, status.tasks_waiting, status.rollouts, status.delivered) == (1, 1, 2, 1)
    assert decode(encode(status), type(status)) == status
