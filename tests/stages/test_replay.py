from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.log import BusLog
from rollyard.pipeline.replay import mismatches_of, render_report
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.rollout import Rollout
from rollyard.schemas.sample import Commit
from rollyard.stages.replay import replay_run
from rollyard.stages.stitching import STITCHER_VERSION, STITCHERS, samples_of

Change = Callable[[Any], Any]


@pytest.fixture
def log_rollout(new_session: Any, log_session: Any) -> Any:
    """Logs rollout `index` of a task with its commit."""

    async def log(index: int, *, change: Change = lambda event: event, turns: int = 10) -> Commit:
        session = new_session(random.Random(index), rollout=Rollout.of("run", "task", index, 1000)).play(turns)
        commit: Commit = await log_session(session, session.close(stitcher=STITCHER_VERSION), change)
        return commit

    return log


async def test_the_log_alone_gives_every_sample_again(bus: Bus, log_rollout: Any) -> None:
    commits = [await log_rollout(index) for index in range(5)]
    late = CallEnd(call_id="c0", run="run", rollout_id=commits[0].rollout_id, attempt=1, at_ms=0, status="aborted")
    await bus.publish(subjects.log_subject("run", commits[0].rollout_id, "call"), encode(late))
    await bus.publish(subjects.log_subject("run", "r-open", "call"), encode(late))
    told: list[tuple[int, int, int]] = []
    report = await replay_run(BusLog(bus), "run", progress=lambda *counts: told.append(counts))
    count = sum(len(commit.samples) for commit in commits)
    assert report.ok
    assert (report.rollouts, report.uncommitted, report.samples, report.equal) == (5, 1, count, count)
    ((rollouts, samples, size),) = told
    assert (rollouts, samples) == (5, count)
    assert size > 10_000
    assert render_report(report) == (
        f"{count} of {count} samples of 5 rollouts equal their commits. 1 rollouts are not at their end yet."
    )


async def test_one_corrupted_token_names_exactly_that_sample(bus: Bus, log_rollout: Any, new_session: Any) -> None:
    for index in (0, 1):
        await log_rollout(index)
    truth = new_session(random.Random(2), rollout=Rollout.of("run", "task", 2, 1000)).play(10)
    leaf = truth.walks()[1][-1]

    def corrupt(event: Any) -> Any:
        if not isinstance(event, CallEnd) or event.call_id != leaf:
            return event
        ids = event.completion_ids.tolist()
        ids[-1] += 1
        return structs.replace(event, completion_ids=TokenIds.of(ids))

    commit = await log_rollout(2, change=corrupt)
    assert len(commit.samples) > 1
    await log_rollout(3)
    report = await replay_run(BusLog(bus), "run")
    assert [(each.rollout_id, each.sample_id, each.problem) for each in report.mismatches] == [
        (commit.rollout_id, commit.samples[1].sample_id, "differs")
    ]
    assert not report.ok
    assert report.equal == report.samples - 1
    assert f"differs: sample {commit.samples[1].sample_id} of rollout {commit.rollout_id}" in render_report(report)


async def test_a_reward_that_was_changed_is_found_in_every_sample_of_the_rollout(bus: Bus, log_rollout: Any) -> None:
    def raise_reward(event: Any) -> Any:
        return structs.replace(event, reward=2.0) if getattr(event, "kind", "") == "evaluated" else event

    commit = await log_rollout(2, change=raise_reward)
    report = await replay_run(BusLog(bus), "run")
    assert {each.sample_id for each in report.mismatches} == {each.sample_id for each in commit.samples}
    assert report.equal == 0


async def test_a_missing_end_and_a_broken_event_are_told_apart(bus: Bus, log_rollout: Any) -> None:
    def lose_ends(event: Any) -> Any:
        return structs.replace(event, status="aborted") if isinstance(event, CallEnd) else event

    lost = await log_rollout(0, change=lose_ends, turns=1)
    broken = await log_rollout(1, turns=1)
    unreadable = Rollout.of("run", "task", 5, 1000).rollout_id
    seq = await bus.publish(subjects.log_subject("run", unreadable, "call"), b"\xc1")
    await bus.create(subjects.log_subject("run", unreadable, "commit"), encode(structs.replace(broken, cut_seq=seq)))
    await log_rollout(2, turns=1)
    report = await replay_run(BusLog(bus), "run")
    assert [(each.rollout_id, each.sample_id, each.problem) for each in report.mismatches] == [
        (lost.rollout_id, lost.samples[0].sample_id, "missing"),
        (unreadable, broken.samples[0].sample_id, "unreadable"),
    ]
    assert f"at {seq} of LOG" in report.mismatches[1].detail
    assert report.rollouts == 4


def test_a_sample_that_the_commit_does_not_name_is_unexpected(new_session: Any) -> None:
    session = new_session(random.Random(0)).play(4)
    commit = session.close(stitcher=STITCHER_VERSION)
    samples = samples_of(session.events, commit)
    found = mismatches_of(commit, samples)
    assert [(each.sample_id, each.problem) for each in found] == [(each.sample_id, "unexpected") for each in samples]
    assert samples


async def test_a_stitcher_that_crashes_on_one_rollout_keeps_no_other_from_its_replay(
    bus: Bus, log_rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = [await log_rollout(index, turns=2) for index in range(3)]
    real = STITCHERS[STITCHER_VERSION]

    def crash(events: Any, commit: Commit) -> Any:
        if commit.index == 1:
            raise IndexError("a bug")
        return real(events, commit)

    monkeypatch.setitem(STITCHERS, STITCHER_VERSION, crash)
    report = await replay_run(BusLog(bus), "run")
    assert {(each.rollout_id, each.problem, each.detail) for each in report.mismatches} == {
        (commits[1].rollout_id, "unreadable", "IndexError: a bug")
    }
    assert report.samples - report.equal == len(commits[1].samples)


@pytest.mark.slow
async def test_a_thousand_rollouts_are_equal_to_the_byte(bus: Bus, log_rollout: Any) -> None:
    slots = asyncio.Semaphore(32)

    async def one(index: int) -> Commit:
        async with slots:
            commit: Commit = await log_rollout(index, turns=2 + index % 7)
            return commit

    async with asyncio.TaskGroup() as group:
        logged = [group.create_task(one(index)) for index in range(1000)]
    samples = sum(len(done.result().samples) for done in logged)
    report = await replay_run(BusLog(bus), "run")
    assert (report.rollouts, report.samples, report.equal, report.mismatches) == (1000, samples, samples, ())
    assert samples > 1000
