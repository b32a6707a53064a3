"""AGGREGATE: one commit and one delivery a rollout, whatever happens, and the group closes once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline import consumer
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.consumer import Ack, Nak
from rollyard.pipeline.handover import MAX_DELIVERIES
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import LeaseView
from rollyard.pipeline.log import BusLog, read_rollout
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.errors import DecodeError
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Lease
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sample import Commit, Delivery, Group
from rollyard.schemas.task import Task, TaskProgress
from rollyard.stages import aggregate as aggregate_module
from rollyard.stages.aggregate import Aggregate
from rollyard.stages.arrow import Received
from rollyard.stages.remake import Recipe
from rollyard.stages.replay import remake_run, replay_run
from rollyard.stages.stage import StageHandler, now_ms

TASK = Task(prompt="p", id="t", group_size=2, metadata={"level": 3})
SLOW_GATEWAY = "gw-1"


@asynccontextmanager
async def aggregating(crew: Any) -> AsyncIterator[StageHandler]:
    async with LeaseView.following(crew.bus, subjects.GATEWAYS) as gateways:
        yield StageHandler(crew.context, Aggregate(crew.context, gateways))


def intent(rollout: Rollout, call_id: str = "c1", **changes: Any) -> CallIntent:
    facts: dict[str, Any] = {
        "call_id": call_id,
        "run": "r",
        "rollout_id": rollout.rollout_id,
        "attempt": 1,
        "gateway": SLOW_GATEWAY,
        "at_ms": now_ms(),
        "latest_end_ms": now_ms() + 60_000,
        "messages": [{"role": "user", "content": "hi"}],
    }
    return CallIntent(**(facts | changes))


def end(rollout: Rollout, call_id: str = "c1") -> CallEnd:
    return CallEnd(
        call_id=call_id,
        run="r",
        rollout_id=rollout.rollout_id,
        attempt=1,
        at_ms=now_ms(),
        status="ok",
        prompt_ids=TokenIds.of([1, 2]),
        completion_ids=TokenIds.of([3, 4]),
        logprobs=Logprobs.of([-0.5, -0.25]),
        reply={"role": "assistant", "content": "ho"},
        finish_reason="stop",
    )


async def log_call(crew: Any, event: CallIntent | CallEnd) -> int:
    seq: int = await crew.bus.publish(subjects.log_subject("r", event.rollout_id, "call"), encode(event))
    return seq


async def finished(crew: Any, index: int = 0, *, ended: bool = True, **changes: Any) -> RolloutState:
    """A rollout that did one call and was judged; its aggregate message is due."""
    rollout = Rollout.of("r", "t", index, TASK.group_size)
    await log_call(crew, intent(rollout))
    if ended:
        await log_call(crew, end(rollout))
    same = {"rollout": rollout, "attempt": 1, "at_ms": now_ms()}
    closed = await crew.context.record(
        RolloutEvent(kind="ran", result=AgentResult(exit_code=0, answer="ho"), status="completed", **same)
    )
    evaluated = await crew.context.record(
        RolloutEvent(kind="evaluated", reward=0.5, metrics={"x": 1.0}, rewards={"y": 0.5}, **same)
    )
    facts = {"position": "aggregate", "step": 3, "closed_seq": closed, "evaluated_seq": evaluated}
    state: RolloutState = await crew.start(TASK, index, **(facts | {"status": "completed"} | changes))
    return state


async def commits(crew: Any) -> list[Commit]:
    return [decode(stored.data, Commit) async for stored in crew.bus.read(subjects.LOG, "log.r.*.commit")]


async def groups(crew: Any) -> list[Group]:
    return [decode(stored.data, Group) async for stored in crew.bus.read(subjects.SAMPLES, "group.r.*")]


async def test_a_rollout_is_committed_and_delivered_and_its_state_ends(crew: Any) -> None:
    state = await finished(crew)
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        assert await handler(held) == Ack()
    (commit,) = await commits(crew)
    (delivery,) = await crew.deliveries()
    assert (commit.status, commit.attempt, commit.closed_seq) == ("completed", 1, state.closed_seq)
    assert commit.evaluated_seq == commit.cut_seq == state.evaluated_seq
    assert [(sample.sample_id) for sample in delivery.samples] == [digest.sample_id for digest in commit.samples]
    assert (delivery.status, delivery.reward, delivery.metrics, delivery.answer) == ("completed", 0.5, {"x": 1.0}, "ho")
    assert delivery.rewards == {"y": 0.5}
    assert (delivery.calls, delivery.metadata, delivery.group_size) == (1, {"level": 3}, 2)
    (sample,) = delivery.samples
    assert (sample.token_ids.tolist(), sample.loss_mask.tolist()) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert (sample.reward, sample.metadata) == (0.5, {"level": 3})
    after = await crew.state(state.rollout)
    assert (after.position, after.status, after.attempt, after.sandbox) == ("ended", "completed", 1, None)
    assert await groups(crew) == []
    assert (await replay_run(BusLog(crew.bus), "r")).ok


async def test_the_headers_of_a_delivery_tell_what_is_counted(crew: Any) -> None:
    """The second call goes on from the first one, in other ids."""
    rollout = Rollout.of("r", "t", 0, TASK.group_size)
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    await log_call(crew, intent(rollout))
    await log_call(crew, end(rollout))
    await log_call(crew, intent(rollout, "c2", messages=turn))
    await log_call(crew, structs.replace(end(rollout, "c2"), prompt_ids=TokenIds.of([1, 2, 9, 9, 5])))
    await finished(crew)
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        assert await handler(held) == Ack()
    (delivery,) = await crew.deliveries()
    assert (delivery.calls, sum(delivery.drift.values())) == (2, 1)
    stored = await crew.bus.last(subjects.sample_subject("r", "t", 0))
    told = {name: value for name, value in stored.headers.items() if name.startswith("Rollyard-")}
    del told["Rollyard-Writer"]
    assert told == {
        "Rollyard-Status": "completed",
        "Rollyard-Calls": "2",
        "Rollyard-Drift": "1",
        "Rollyard-Trained": "4",
    }


async def test_the_last_of_a_group_closes_it_once(crew: Any) -> None:
    progress: Bucket[TaskProgress] = Bucket(crew.bus, subjects.TASK_BUCKET, TaskProgress)
    await progress.create(
        "r.t", TaskProgress(content_hash="x", group_size=2, progress="fanned_out", task_id="t", run="r")
    )
    for index in range(2):
        await finished(crew, index)
    held = await crew.take("aggregate", count=2)
    async with aggregating(crew) as one, aggregating(crew) as other, asyncio.TaskGroup() as tries:
        # Both rollouts at two aggregators each, all at once.
        for handler in (one, other):
            for message in held:
                tries.create_task(handler(message))
    assert len(await commits(crew)) == len(await crew.deliveries()) == 2
    assert await groups(crew) == [Group(run="r", task_id="t", group_id="t", size=2)]
    found = await progress.get("r.t")
    assert found is not None
    assert found[0].progress == "closed"
    for index in range(2):
        assert (await crew.state(Rollout.of("r", "t", index, 2))).position == "ended"


async def test_a_commit_that_stands_is_obeyed(crew: Any) -> None:
    """Somebody committed before the evaluation was in the log: the delivery is made from that commit."""
    state = await finished(crew)
    standing = Commit(
        run="r",
        task_id="t",
        group_id="t",
        group_size=2,
        rollout_id=state.rollout.rollout_id,
        index=0,
        attempt=1,
        status="truncated",
        failure=Failure.of("agent_budget", "as committed"),
        cut_seq=state.closed_seq,
        closed_seq=state.closed_seq,
        stitcher=aggregate_module.STITCHER_VERSION,
        metadata={"from": "the commit"},
    )
    await crew.bus.create(subjects.log_subject("r", state.rollout.rollout_id, "commit"), encode(standing))
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        assert await handler(held) == Ack()
    assert await commits(crew) == [standing]
    (delivery,) = await crew.deliveries()
    assert (delivery.status, delivery.reward, delivery.metadata) == ("truncated", None, {"from": "the commit"})
    assert [sample.reward for sample in delivery.samples] == [None]
    assert (await crew.state(state.rollout)).status == "truncated"


async def test_a_commit_of_an_unknown_stitcher_waits_for_a_release_that_has_it(crew: Any) -> None:
    state = await finished(crew)
    facts = {"run": "r", "task_id": "t", "group_id": "t", "group_size": 2, "index": 0, "attempt": 1}
    standing = Commit(rollout_id=state.rollout.rollout_id, status="completed", stitcher="from-the-future", **facts)
    await crew.bus.create(subjects.log_subject("r", state.rollout.rollout_id, "commit"), encode(standing))
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        for deliveries in (1, MAX_DELIVERIES + 1):
            with pytest.raises(Exception, match="names stitcher 'from-the-future', which this release lacks"):
                await handler(replace(held, deliveries=deliveries))
    assert await crew.deliveries() == []
    assert await crew.letters() == []


async def test_it_waits_for_a_call_that_may_still_end(crew: Any) -> None:
    state = await finished(crew, ended=False)
    (held,) = await crew.take("aggregate")
    gateways: Bucket[Lease] = Bucket(crew.bus, subjects.GATEWAYS, Lease)
    await gateways.put(SLOW_GATEWAY, Lease(owner=SLOW_GATEWAY, lease_s=600))
    async with aggregating(crew) as handler:
        working = asyncio.create_task(handler(held))
        done, _ = await asyncio.wait([working], timeout=0.5)
        assert not done
        assert await commits(crew) == []
        await log_call(crew, end(state.rollout))
        assert await working == Ack()
    (commit,) = await commits(crew)
    assert (commit.lost_calls, len(commit.samples)) == ((), 1)


@pytest.mark.parametrize("why", ["its gateway is gone", "its time is over", "no gateway made it"])
async def test_a_call_that_can_get_no_end_any_more_is_lost(crew: Any, why: str) -> None:
    if why == "its time is over":
        await Bucket(crew.bus, subjects.GATEWAYS, Lease).put(SLOW_GATEWAY, Lease(owner=SLOW_GATEWAY, lease_s=600))
    state = await finished(crew)
    rollout = Rollout.of("r", "t", 1, 2)
    changes: dict[str, dict[str, Any]] = {
        "its time is over": {"latest_end_ms": now_ms() - 1},
        "no gateway made it": {"gateway": ""},
    }
    await log_call(crew, intent(rollout, **changes.get(why, {})))
    state = await crew.start(TASK, 1, position="aggregate", step=3, status="completed")
    held = (await crew.take("aggregate", count=2))[-1]
    async with aggregating(crew) as handler:
        assert await handler(held) == Ack()
    (commit,) = await commits(crew)
    assert (commit.rollout_id, commit.lost_calls, commit.samples) == (state.rollout.rollout_id, ("c1",), ())
    assert [delivery.status for delivery in await crew.deliveries()] == ["completed"]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_what_failed_is_delivered_without_samples_and_waits_for_nothing(crew: Any, status: str) -> None:
    await Bucket(crew.bus, subjects.GATEWAYS, Lease).put(SLOW_GATEWAY, Lease(owner=SLOW_GATEWAY, lease_s=600))
    failure = Failure.of("llm", "no model", "start one")
    await finished(crew, ended=False, status=status, failure=failure)
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        assert await handler(held) == Ack()
    (delivery,) = await crew.deliveries()
    assert (delivery.status, delivery.failure, delivery.samples) == (status, failure, ())


# --- poison ---


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "backoff_s", lambda deliveries, **limits: 0.01)


async def check_gave_up(crew: Any, state: RolloutState) -> Delivery:
    (delivery,) = await crew.until(crew.deliveries)
    assert isinstance(delivery, Delivery)
    assert (delivery.status, delivery.samples, delivery.reward) == ("failed", (), None)
    assert delivery.failure is not None
    assert delivery.failure.kind == "infra"
    assert delivery.failure.message.startswith("aggregate was tried 5 times and did not end; the last try: ")

    async def ended() -> bool:
        return (await crew.state(state.rollout)).position == "ended"

    await crew.until(ended)
    (letter,) = await crew.letters("r")
    assert (letter.stage, letter.rollout_id) == ("aggregate", state.rollout.rollout_id)
    assert await crew.due() == []
    return delivery


async def test_an_event_that_cannot_be_read_ends_the_rollout_at_the_sixth_delivery(crew: Any, at_once: None) -> None:
    state = await finished(crew)
    await crew.bus.publish(subjects.log_subject("r", state.rollout.rollout_id, "call"), b"\x81broken")
    with pytest.raises(DecodeError, match="of LOG: not a"):
        await read_rollout(crew.bus, "r", state.rollout.rollout_id)
    async with crew.at_work("aggregate"):
        delivery = await check_gave_up(crew, state)
    assert delivery.metadata == {"level": 3}


async def test_a_stitcher_that_crashes_ends_the_rollout_at_the_sixth_delivery(
    crew: Any, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is `committing` by then; what decides is whether a commit stands."""
    real, tries = aggregate_module.outcome_of, 0

    def crash(events: Any, commit: Commit) -> Any:
        nonlocal tries
        if commit.status == "failed":
            return real(events, commit)
        tries += 1
        raise RuntimeError("a bug")

    monkeypatch.setattr(aggregate_module, "outcome_of", crash)
    state = await finished(crew)
    async with crew.at_work("aggregate"):
        await check_gave_up(crew, state)
    assert tries == MAX_DELIVERIES
    made: list[Received] = []
    report = await remake_run(BusLog(crew.bus), "r", Recipe(recover=True), write=made.append)
    assert (report.recovered, report.made.samples, report.mismatches) == (1, 1, ())
    delivery = made[0].delivery
    assert (delivery.status, delivery.failure, delivery.reward, delivery.answer) == ("completed", None, 0.5, "ho")
    assert delivery.samples[0].token_ids == TokenIds.of([1, 2, 3, 4])


async def test_a_task_without_a_body_does_not_keep_its_rollouts_from_their_end(crew: Any, at_once: None) -> None:
    state = await finished(crew)
    await Bucket(crew.bus, subjects.TASK_BUCKET, Any).delete("r.t.body")
    async with crew.at_work("aggregate"):
        delivery = await check_gave_up(crew, state)
    assert delivery.metadata == {}


async def test_two_that_commit_at_once_do_not_both_move_the_state(crew: Any) -> None:
    state = await finished(crew)
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        outcomes = await asyncio.gather(*(handler(held) for _ in range(4)))
    assert outcomes.count(Ack()) == 1
    assert outcomes.count(Nak(0.05)) == 3
    assert len(await commits(crew)) == len(await crew.deliveries()) == 1
    after = await crew.state(state.rollout)
    assert structs.replace(after, writer="").step == 4
