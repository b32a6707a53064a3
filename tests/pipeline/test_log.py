from __future__ import annotations

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.log import read_rollout, rollouts_of
from rollyard.schemas import subjects
from rollyard.schemas.call import CallIntent
from rollyard.schemas.errors import BusError, DecodeError
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit


async def log_rollout(bus: Bus, index: int, calls: int, *, run: str = "r", commit: bool = True) -> str:
    rollout = Rollout.of(run, "t", index, 9)
    for number in range(calls):
        intent = CallIntent(
            call_id=f"c{number}",
            run=run,
            rollout_id=rollout.rollout_id,
            attempt=1,
            gateway="g",
            at_ms=0,
            latest_end_ms=0,
            messages=[{"role": "user", "content": "x" * 3000}],
        )
        await bus.publish(subjects.log_subject(run, rollout.rollout_id, "call"), encode(intent))
    event = RolloutEvent(kind="ran", rollout=rollout, attempt=1, at_ms=0)
    await bus.publish(subjects.log_subject(run, rollout.rollout_id, "life"), encode(event))
    if commit:
        record = Commit(
            run=run,
            task_id="t",
            group_id="t",
            group_size=9,
            rollout_id=rollout.rollout_id,
            index=index,
            attempt=1,
            status="completed",
        )
        await bus.publish(subjects.log_subject(run, rollout.rollout_id, "commit"), encode(record))
    return rollout.rollout_id


async def test_a_rollout_is_read_whole_and_in_order_also_over_several_pages(bus: Bus) -> None:
    await log_rollout(bus, 0, 3)
    wanted = await log_rollout(bus, 1, 300)
    await log_rollout(bus, 2, 3)
    events = await read_rollout(bus, "r", wanted, at_least=3 + 2 + 302)
    assert [getattr(event, "call_id", type(event).__name__) for _, event in events] == [
        *(f"c{number}" for number in range(300)),
        "RolloutEvent",
        "Commit",
    ]
    assert [seq for seq, _ in events] == list(range(6, 308))


async def test_what_is_not_visible_yet_is_an_error_not_a_shorter_log(bus: Bus) -> None:
    rollout_id = await log_rollout(bus, 0, 1)
    with pytest.raises(BusError, match="not yet 99"):
        await read_rollout(bus, "r", rollout_id, at_least=99)


async def test_a_run_is_grouped_by_rollout_in_one_pass(bus: Bus) -> None:
    first = await log_rollout(bus, 0, 2, commit=False)
    second = await log_rollout(bus, 1, 1)
    await log_rollout(bus, 1, 1, run="other")
    await log_rollout(bus, 0, 0)
    late = await log_rollout(bus, 1, 1, commit=False)
    open_one = await log_rollout(bus, 2, 1, commit=False)
    assert late == second
    found = [(rollout.rollout_id, rollout.committed, len(rollout.events())) async for rollout in rollouts_of(bus, "r")]
    assert found == [(second, True, 3), (first, True, 5), (open_one, False, 2)]


async def test_an_event_that_cannot_be_read_names_its_place(bus: Bus) -> None:
    rollout_id = await log_rollout(bus, 0, 0, commit=False)
    seq = await bus.publish(subjects.log_subject("r", rollout_id, "call"), b"\xc1 broken")
    with pytest.raises(DecodeError, match=rf"log\.r\.{rollout_id}\.call at {seq} of LOG"):
        await read_rollout(bus, "r", rollout_id)
