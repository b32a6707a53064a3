from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.replay import render_report
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit, SampleDigest
from rollyard.stages.replay import replay_run
from rollyard.stages.stitching import samples_of

Change = Callable[[Any], Any]


async def log_rollout(
    bus: Bus, new_session: Any, index: int, *, change: Change = lambda event: event, turns: int = 10
) -> Commit:
    """Log a rollout with its commit; what `change` makes of an event is what the log then holds."""
    session = new_session(random.Random(index), rollout=Rollout.of("run", "task", index, 9)).play(turns)
    commit = session.close()
    stored: list[tuple[int, Any]] = []
    seqs: dict[int, int] = {}
    for old_seq, event in session.events:
        kind = "life" if isinstance(event, RolloutEvent) else "call"
        subject = subjects.log_subject("run", commit.rollout_id, kind)
        seqs[old_seq] = await bus.publish(subject, encode(change(event)))
        stored.append((seqs[old_seq], event))
    commit = structs.replace(
        commit,
        cut_seq=seqs[commit.cut_seq],
        closed_seq=seqs[commit.closed_seq],
        evaluated_seq=seqs[commit.evaluated_seq],
    )
    digests = [
        SampleDigest(sample_id=sample.sample_id, digest=sample_digest(sample)) for sample in samples_of(stored, commit)
    ]
    commit = structs.replace(commit, samples=tuple(digests))
    await bus.create(subjects.log_subject("run", commit.rollout_id, "commit"), encode(commit))
    return commit


async def test_the_log_alone_gives_every_sample_again(bus: Bus, new_session: Any) -> None:
    commits = [await log_rollout(bus, new_session, index) for index in range(5)]
    late = CallEnd(call_id="c0", run="run", rollout_id=commits[0].rollout_id, attempt=1, at_ms=0, status="aborted")
    await bus.publish(subjects.log_subject("run", commits[0].rollout_id, "call"), encode(late))
    await bus.publish(subjects.log_subject("run", "r-open", "call"), encode(late))
    told: list[tuple[int, int]] = []
    report = await replay_run(bus, "run", progress=lambda rollouts, samples: told.append((rollouts, samples)))
    count = sum(len(commit.samples) for commit in commits)
    assert report.ok
    assert (report.rollouts, report.uncommitted, report.samples, report.equal) == (5, 1, count, count)
    assert told == [(5, count)]
    assert render_report(report).splitlines() == [
        f"run run: {count} of {count} samples of 5 rollouts are equal",
        "1 rollouts are not at their end yet",
    ]


async def test_one_corrupted_token_names_exactly_that_sample(bus: Bus, new_session: Any) -> None:
    for index in (0, 1):
        await log_rollout(bus, new_session, index)
    truth = new_session(random.Random(2), rollout=Rollout.of("run", "task", 2, 9)).play(10)
    leaf = truth.walks()[1][-1]

    def corrupt(event: Any) -> Any:
        if not isinstance(event, CallEnd) or event.call_id != leaf:
            return event
        ids = event.completion_ids.tolist()
        ids[-1] += 1
        return structs.replace(event, completion_ids=TokenIds.of(ids))

    commit = await log_rollout(bus, new_session, 2, change=corrupt)
    assert len(commit.samples) > 1
    await log_rollout(bus, new_session, 3)
    report = await replay_run(bus, "run")
    assert [(each.rollout_id, each.sample_id, each.problem) for each in report.mismatches] == [
        (commit.rollout_id, commit.samples[1].sample_id, "differs")
    ]
    assert not report.ok
    assert report.equal == report.samples - 1
    assert f"differs: sample {commit.samples[1].sample_id} of rollout {commit.rollout_id}" in render_report(report)


async def test_a_reward_that_was_changed_is_found_in_every_sample_of_the_rollout(bus: Bus, new_session: Any) -> None:
    def raise_reward(event: Any) -> Any:
        return structs.replace(event, reward=2.0) if getattr(event, "kind", "") == "evaluated" else event

    commit = await log_rollout(bus, new_session, 2, change=raise_reward)
    report = await replay_run(bus, "run")
    assert {each.sample_id for each in report.mismatches} == {each.sample_id for each in commit.samples}
    assert report.equal == 0


async def test_a_missing_end_and_a_broken_event_are_told_apart(bus: Bus, new_session: Any) -> None:
    def lose_ends(event: Any) -> Any:
        return structs.replace(event, status="aborted") if isinstance(event, CallEnd) else event

    lost = await log_rollout(bus, new_session, 0, change=lose_ends, turns=1)
    broken = await log_rollout(bus, new_session, 1, turns=1)
    unreadable = Rollout.of("run", "task", 5, 9).rollout_id
    seq = await bus.publish(subjects.log_subject("run", unreadable, "call"), b"\xc1")
    await bus.create(subjects.log_subject("run", unreadable, "commit"), encode(structs.replace(broken, cut_seq=seq)))
    await log_rollout(bus, new_session, 2, turns=1)
    report = await replay_run(bus, "run")
    assert [(each.rollout_id, each.sample_id, each.problem) for each in report.mismatches] == [
        (lost.rollout_id, lost.samples[0].sample_id, "missing"),
        (unreadable, broken.samples[0].sample_id, "unreadable"),
    ]
    assert f"at {seq} of LOG" in report.mismatches[1].detail
    assert report.rollouts == 4
