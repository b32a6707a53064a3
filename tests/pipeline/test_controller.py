"""The controller: dead places, cancels, groups left open. It writes no rollout's state, and may be there twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline import controller as controller_module
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.controller import Controller
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import hold_lease
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import Cancel, Lease
from rollyard.schemas.rollout import Position, RolloutState, SandboxRef, StageMessage
from rollyard.schemas.sample import Delivery, Group
from rollyard.schemas.task import Task, TaskProgress

LEASE_S = 0.5
PLACE = "local-1"


@asynccontextmanager
async def controlling(crew: Any, count: int = 1, lease_s: float = LEASE_S) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(Controller(crew.bus, lease_s=lease_s, tick_s=0.05).run(stop))
        try:
            yield
        finally:
            stop.set()


async def at(crew: Any, position: Position, index: int = 0, place: str = PLACE, **changes: Any) -> RolloutState:
    ref = SandboxRef(backend="local", place=place, handle=f"/{index}")
    task = Task(prompt="p", id="t", group_size=9, max_attempts=2)
    state: RolloutState = await crew.start(task, index, position=position, place=place, sandbox=ref, step=4, **changes)
    return state


async def takeovers(crew: Any) -> list[StageMessage]:
    """The takeovers in STAGES, in their order."""
    info = (await crew.bus.stream_info(subjects.STAGES))["state"]
    stored = [await crew.bus.get(subjects.STAGES, seq) for seq in range(info["first_seq"], info["last_seq"] + 1)]
    messages = [decode(one.data, StageMessage) for one in stored if one is not None]
    return [message for message in messages if message.takeover is not None]


async def some_takeovers(crew: Any, count: int) -> list[StageMessage]:
    async def enough() -> list[StageMessage]:
        found = await takeovers(crew)
        return found if len(found) >= count else []

    found: list[StageMessage] = await crew.until(enough)
    return found


async def ticks(crew: Any, count: int = 10) -> None:
    await asyncio.sleep(0.05 * count)


async def test_rollouts_of_a_dead_place_move_to_init_or_to_their_end(crew: Any) -> None:
    first, last = await at(crew, "run", 0), await at(crew, "eval", 1, attempt=2)
    async with controlling(crew, 2):
        found = await some_takeovers(crew, 2)
        await ticks(crew)
    by_rollout = {message.rollout: message for message in found}
    again, gone = by_rollout[first.rollout], by_rollout[last.rollout]
    assert (again.stage, again.step, again.attempt) == ("init", 4, 1)
    assert (gone.stage, gone.step, gone.attempt) == ("aggregate", 4, 2)
    assert again.takeover is not None
    assert (again.takeover.kind, again.takeover.message) == ("infra", f"the place {PLACE} died")
    # Nobody took them, many ticks and two controllers: still one each.
    assert len(await takeovers(crew)) == 2
    assert [await crew.state(state.rollout) for state in (first, last)] == [first, last]


async def test_nothing_happens_to_who_lives_or_is_everywhere_or_was_decided(crew: Any) -> None:
    await at(crew, "run", 0)
    await at(crew, "run", 1, place="any")
    await at(crew, "aggregate", 2, place="dead")
    await at(crew, "committing", 3, place="dead")
    lease = Lease(owner=PLACE, lease_s=LEASE_S)
    async with hold_lease(crew.bus, subjects.NODES, lease), controlling(crew):
        await asyncio.sleep(LEASE_S * 3)
        assert await takeovers(crew) == []


async def test_a_place_gets_the_time_of_a_lease_to_show_itself(crew: Any) -> None:
    await at(crew, "run")
    async with controlling(crew, lease_s=30):
        await ticks(crew, 20)
    assert await takeovers(crew) == []


async def test_a_place_that_stops_renewing_dies(crew: Any) -> None:
    state = await at(crew, "run")
    async with controlling(crew):
        async with hold_lease(crew.bus, subjects.NODES, Lease(owner=PLACE, lease_s=LEASE_S), release=False):
            await asyncio.sleep(LEASE_S * 3)
            assert await takeovers(crew) == []
        (message,) = await some_takeovers(crew, 1)
    assert message.rollout == state.rollout


async def test_time_without_a_bus_counts_against_nobody(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await at(crew, "run")
    real, away = crew.bus.api, True

    async def api(call: str, body: Any = None) -> Any:
        if call == "INFO" and away:
            raise BusError("no answer")
        return await real(call, body)

    monkeypatch.setattr(crew.bus, "api", api)
    async with controlling(crew):
        await asyncio.sleep(LEASE_S * 3)
        away = False
        await asyncio.sleep(LEASE_S / 2)
        assert await takeovers(crew) == []
        await some_takeovers(crew, 1)


@pytest.mark.parametrize(("key", "cancelled"), [(("r",), 3), (("r", "t"), 3), (("r", "t", 1), 1), (("r", "u"), 0)])
async def test_a_cancel_reaches_what_nobody_holds(crew: Any, key: tuple[Any, ...], cancelled: int) -> None:
    for index, position in enumerate(("init", "run", "eval", "aggregate")):
        await at(crew, position, index)  # type: ignore[arg-type]
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(subjects.cancel_key(*key), Cancel(reason="enough"))
    async with controlling(crew, lease_s=30):
        found = await some_takeovers(crew, cancelled) if cancelled else []
        await ticks(crew)
    assert len(found) == len(await takeovers(crew)) == cancelled
    for message in found:
        assert (message.stage, message.takeover.kind, message.takeover.message) == ("aggregate", "cancelled", "enough")  # type: ignore[union-attr]


async def test_a_dead_place_is_forgotten_once_no_state_names_it(crew: Any) -> None:
    nodes: Bucket[Lease] = Bucket(crew.bus, subjects.NODES, Lease)
    await nodes.put(PLACE, Lease(owner=PLACE, lease_s=LEASE_S))
    state = await at(crew, "run")
    await crew.take("run", PLACE)  # makes the consumer
    async with controlling(crew):
        await some_takeovers(crew, 1)
        await ticks(crew)
        assert await nodes.get(PLACE) is not None
        # INIT takes the rollout over: nothing names the place any more.
        states: Bucket[RolloutState] = Bucket(crew.bus, subjects.ROLLOUTS, RolloutState)
        await states.put(
            subjects.rollout_key("r", state.rollout.rollout_id),
            structs.replace(state, position="init", step=5, attempt=2, place=None, sandbox=None),
        )

        async def forgotten() -> bool:
            return await nodes.get(PLACE) is None

        await crew.until(forgotten)
    assert await crew.bus.subjects(subjects.STAGES, f"stage.run.{PLACE}.*") == {}
    with pytest.raises(BusError, match="consumer not found"):
        await crew.bus.api(f"CONSUMER.INFO.STAGES.run-{PLACE}")
    assert len(await takeovers(crew)) == 1


async def test_a_group_left_open_is_closed(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last aggregator died between the delivery and the group; another group still has a rollout at work."""
    monkeypatch.setattr(controller_module, "GROUP_LOOK_S", 0.05)
    progress: Bucket[TaskProgress] = Bucket(crew.bus, subjects.TASK_BUCKET, TaskProgress)
    for task in ("t", "u"):
        facts = {"run": "r", "task_id": task, "group_id": task, "group_size": 1, "attempt": 1, "index": 0}
        delivery = Delivery(rollout_id="x", status="completed", **facts)
        value = TaskProgress(content_hash="x", group_size=1, progress="fanned_out", task_id=task, run="r")
        await progress.put(f"r.{task}", value)
        await crew.bus.create(subjects.sample_subject("r", task, 0), encode(delivery))
    await at(crew, "committing")
    async with controlling(crew, 2, lease_s=30):

        async def closed() -> bool:
            found = await progress.get("r.u")
            return found is not None and found[0].progress == "closed"

        await crew.until(closed)
        await ticks(crew, 5)
    groups = [decode(stored.data, Group) async for stored in crew.bus.read(subjects.SAMPLES, "group.r.*")]
    assert groups == [Group(run="r", task_id="u", group_id="u", size=1)]


async def test_records_that_cannot_be_read_do_not_blind_it(crew: Any) -> None:
    for bucket, key in ((subjects.ROLLOUTS, "r.x"), (subjects.CANCEL, "x"), (subjects.NODES, "x")):
        await crew.bus.publish(subjects.kv_subject(bucket, key), b"\x81broken")
    state = await at(crew, "run")
    async with controlling(crew):
        (message,) = await some_takeovers(crew, 1)
    assert message.rollout == state.rollout


async def test_a_gateway_that_has_long_been_dead_is_forgotten_and_one_that_lives_is_not(
    crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "GROUP_LOOK_S", 0.0)
    monkeypatch.setattr(controller_module, "GATEWAY_MOURNED_S", 0.3)
    leases: Bucket[Lease] = Bucket(crew.bus, subjects.GATEWAYS, Lease)
    await leases.put("gw-dead", Lease(owner="gw-dead", lease_s=LEASE_S))
    async with (
        hold_lease(crew.bus, subjects.GATEWAYS, Lease(owner="gw-alive", lease_s=LEASE_S)),
        controlling(crew),
    ):

        async def forgotten() -> bool:
            return await leases.get("gw-dead") is None

        await crew.until(forgotten)
        await ticks(crew)
        assert await leases.get("gw-alive") is not None
