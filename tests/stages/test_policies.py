"""The sample policy of a task or run: which is in effect, that a commit names it, what it makes of failed rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.consumer import Ack
from rollyard.pipeline.handover import MAX_DELIVERIES
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import LeaseView
from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.errors import TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Lease, Run
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.policy import LENIENCE_RULES, SamplePolicy
from rollyard.schemas.rollout import Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sample import Commit, Delivery
from rollyard.schemas.task import Task
from rollyard.stages.aggregate import Aggregate
from rollyard.stages.policies import Policies, may_have_samples
from rollyard.stages.stage import StageHandler, now_ms
from rollyard.stages.stitchers import lenience

TASK = Task(prompt="p", id="t")
ROLLOUT = Rollout.of("r", "t", 0, 1)
CUT = SamplePolicy(max_tokens=3)
KEPT = SamplePolicy(failed="keep")
WHO: dict[str, Any] = {"run": "r", "task_id": "t", "group_id": "t", "group_size": 1, "index": 0, "attempt": 1}
BROKEN = Failure.of("agent", "the agent crashed")


@asynccontextmanager
async def aggregating(crew: Any) -> AsyncIterator[StageHandler]:
    async with LeaseView.following(crew.bus, subjects.GATEWAYS) as gateways:
        yield StageHandler(crew.context, Aggregate(crew.context, gateways))


async def begin(crew: Any, policy: SamplePolicy) -> None:
    await Bucket[Run](crew.bus, subjects.RUNS, Run).create("r", Run(run="r", samples=policy))


async def log_call(crew: Any, *, intent: bool = True, end: bool = True) -> None:
    subject = subjects.log_subject("r", ROLLOUT.rollout_id, "call")
    same: dict[str, Any] = {"call_id": "c", "run": "r", "rollout_id": ROLLOUT.rollout_id, "attempt": 1}
    asked = CallIntent(
        **same, gateway="gw", at_ms=now_ms(), latest_end_ms=now_ms() + 60_000, messages=[{"role": "user"}]
    )
    said = CallEnd(
        **same,
        at_ms=now_ms(),
        status="ok",
        prompt_ids=TokenIds.of([1, 2]),
        completion_ids=TokenIds.of([3, 4]),
        logprobs=Logprobs.of([-0.5, -0.25]),
        reply={"role": "assistant", "content": "ho"},
        finish_reason="stop",
    )
    for event in ([asked] if intent else []) + ([said] if end else []):
        await crew.bus.publish(subject, encode(event))


async def due(crew: Any, task: Task = TASK, **changes: Any) -> RolloutState:
    """A rollout whose aggregate message is due; without a status it completed."""
    facts: dict[str, Any] = {"position": "aggregate", "step": 3, "status": "completed"}
    if "status" not in changes:
        same = {"rollout": ROLLOUT, "attempt": 1, "at_ms": now_ms()}
        facts["closed_seq"] = await crew.context.record(RolloutEvent(kind="ran", status="completed", **same))
    state: RolloutState = await crew.start(task, **(facts | changes))
    return state


async def aggregated(crew: Any) -> tuple[Commit, Delivery]:
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        assert await handler(held) == Ack()
    return await outcome(crew)


async def outcome(crew: Any) -> tuple[Commit, Delivery]:
    (commit,) = [decode(stored.data, Commit) async for stored in crew.bus.read(subjects.LOG, "log.r.*.commit")]
    (delivery,) = await crew.deliveries()
    return commit, delivery


@pytest.mark.parametrize(
    ("own", "of_run", "in_effect"),
    [
        (None, None, SamplePolicy()),
        (None, CUT, CUT),
        (SamplePolicy(min_trained_tokens=2), CUT, SamplePolicy(min_trained_tokens=2)),
        (SamplePolicy(), CUT, SamplePolicy()),
        (CUT, None, CUT),
    ],
)
async def test_the_commit_names_the_task_s_policy_else_the_run_s(
    crew: Any, own: SamplePolicy | None, of_run: SamplePolicy | None, in_effect: SamplePolicy
) -> None:
    if of_run is not None:
        await begin(crew, of_run)
    await log_call(crew)
    await due(crew, structs.replace(TASK, samples=own))
    commit, delivery = await aggregated(crew)
    (sample,) = delivery.samples
    assert commit.policy == in_effect
    assert sample.policy == in_effect.digest()
    assert sample.token_ids.tolist() == [1, 2, 3, 4][: in_effect.max_tokens]
    assert [digest.sample_id for digest in commit.samples] == [sample.sample_id]


@pytest.mark.parametrize("fate", ["keep", "mask"])
async def test_a_failed_rollout_whose_samples_are_wanted_waits_for_its_calls(crew: Any, fate: Any) -> None:
    await begin(crew, SamplePolicy(failed=fate))
    await Bucket[Lease](crew.bus, subjects.GATEWAYS, Lease).put("gw", Lease(owner="gw", lease_s=60))
    await log_call(crew, end=False)
    await due(crew, status="failed", failure=BROKEN)
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler, asyncio.TaskGroup() as group:
        working = group.create_task(handler(held))
        await asyncio.sleep(0.3)
        assert not working.done()
        await log_call(crew, intent=False)
        assert await working == Ack()
    commit, delivery = await outcome(crew)
    (sample,) = delivery.samples
    assert (delivery.status, delivery.failure, delivery.reward) == ("failed", BROKEN, None)
    assert (sample.status, sample.reward, sample.token_ids.tolist()) == ("failed", None, [1, 2, 3, 4])
    assert (sum(sample.loss_mask), sample.masked) == ((2, "") if fate == "keep" else (0, "failed"))
    assert (commit.lost_calls, commit.cut_seq > 0) == ((), True)


@pytest.mark.parametrize(
    ("status", "policy"), [("failed", SamplePolicy()), ("cancelled", KEPT), ("cancelled", SamplePolicy())]
)
async def test_what_makes_no_samples_waits_for_nothing(crew: Any, status: Any, policy: SamplePolicy) -> None:
    await begin(crew, policy)
    await Bucket[Lease](crew.bus, subjects.GATEWAYS, Lease).put("gw", Lease(owner="gw", lease_s=60))
    await log_call(crew, end=False)
    await due(crew, status=status, failure=BROKEN)
    commit, delivery = await aggregated(crew)
    assert (commit.status, commit.samples, delivery.samples) == (status, (), ())
    assert commit.policy == policy
    assert not may_have_samples(status, policy)


async def test_a_commit_of_a_failed_rollout_that_stands_is_obeyed_with_its_policy(crew: Any) -> None:
    await begin(crew, SamplePolicy())
    await log_call(crew)
    state = await due(crew, status="failed", failure=BROKEN)
    seqs = [stored.seq async for stored in crew.bus.read(subjects.LOG, "log.r.*.call")]
    standing = Commit(
        **WHO,
        rollout_id=state.rollout.rollout_id,
        status="failed",
        failure=BROKEN,
        cut_seq=max(seqs),
        stitcher="2",
        policy=KEPT,
    )
    await crew.bus.create(subjects.log_subject("r", state.rollout.rollout_id, "commit"), encode(standing))
    commit, delivery = await aggregated(crew)
    assert commit == standing
    assert [sample.token_ids.tolist() for sample in delivery.samples] == [[1, 2, 3, 4]]


async def test_a_commit_that_gave_up_is_delivered_though_the_events_cannot_be_read(crew: Any) -> None:
    await log_call(crew)
    await crew.bus.publish(subjects.log_subject("r", ROLLOUT.rollout_id, "call"), b"\x00?")
    gave_up = Commit(**WHO, rollout_id=ROLLOUT.rollout_id, status="failed", stitcher="2", policy=KEPT)
    await crew.bus.create(subjects.log_subject("r", ROLLOUT.rollout_id, "commit"), encode(gave_up))
    state = await due(crew)
    (held,) = await crew.take("aggregate")
    async with aggregating(crew) as handler:
        assert await handler(replace(held, deliveries=MAX_DELIVERIES + 1)) == Ack()
    assert (await outcome(crew))[1].samples == ()
    assert (await crew.state(state.rollout)).position == "ended"


async def test_a_failed_rollout_whose_task_cannot_be_read_ends_by_the_run_s_policy(crew: Any) -> None:
    await begin(crew, KEPT)
    await log_call(crew)
    state = await due(crew, structs.replace(TASK, samples=CUT), status="failed", failure=BROKEN)
    await crew.bus.publish(subjects.kv_subject(subjects.TASK_BUCKET, subjects.task_key("r", "t") + ".body"), b"\x00?")
    crew.context.tasks = TaskStore(crew.bus)
    commit, delivery = await aggregated(crew)
    assert commit.policy == KEPT
    assert len(delivery.samples) == 1
    policies = Policies(crew.bus, TaskStore(crew.bus))
    assert await policies.policy_of(state) == KEPT
    gone = structs.replace(state, rollout=structs.replace(ROLLOUT, task_id="gone"), status="completed")
    with pytest.raises(TaskError, match="has no body"):
        await policies.policy_of(gone)


async def test_the_policy_of_a_run_is_read_once_and_that_of_an_unknown_run_every_time(crew: Any) -> None:
    state = await due(crew)
    policies = Policies(crew.bus, crew.context.tasks)
    assert await policies.policy_of(state) == SamplePolicy()
    await begin(crew, CUT)
    assert await policies.policy_of(state) == CUT
    await Bucket[Run](crew.bus, subjects.RUNS, Run).delete("r")
    assert await policies.policy_of(state) == CUT


def test_every_rule_of_the_stitcher_can_be_switched_off_by_name() -> None:
    assert set(LENIENCE_RULES) == lenience.NAMES
    assert len(set(LENIENCE_RULES)) == len(LENIENCE_RULES)
