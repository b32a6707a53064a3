"""Samples made anew: by another stitcher or policy, of rollouts that were given up, as a diff, as files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.datasets import connect, find_samples
from rollyard.pipeline.log import BusLog
from rollyard.pipeline.sample_diff import Diff, SampleChange
from rollyard.schemas import subjects
from rollyard.schemas.call import CallIntent
from rollyard.schemas.errors import SetupError
from rollyard.schemas.failure import Failure
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit, Delivery
from rollyard.stages import sample_folder
from rollyard.stages.arrow import Received
from rollyard.stages.remake import Recipe
from rollyard.stages.replay import RemakeReport, remake_run
from rollyard.stages.sample_folder import SampleFolder

GAVE_UP = Failure.of("infra", "aggregate was tried 5 times and did not end")


def played(new_session: Any, index: int) -> Any:
    """A session of three main calls and a title."""
    session = new_session(random.Random(index), rollout=Rollout.of("run", "task", index, 9))
    first = session.ask(None)
    second = session.ask(first)
    title = session.ask(None)
    session.ask(second)
    for call_id in list(session.owed):
        session.log(session.owed.pop(call_id))
    session.events = [
        (seq, structs.replace(event, scenario="title"))
        if isinstance(event, CallIntent) and event.call_id == title.call_id
        else (seq, event)
        for seq, event in session.events
    ]
    return session


def sampled(session: Any, *, title: bool) -> int:
    """Tokens that the model sampled, with or without those of the title."""
    return sum(len(call.sampled) for number, call in enumerate(session.calls) if title or number != 2)


async def remake(bus: Bus, recipe: Recipe, **wanted: Any) -> tuple[RemakeReport, list[Delivery]]:
    made: list[Received] = []
    report = await remake_run(BusLog(bus), "run", recipe, write=made.append, **wanted)
    return report, [each.delivery for each in made]


def ids(deliveries: list[Delivery]) -> list[str]:
    return [sample.sample_id for delivery in deliveries for sample in delivery.samples]


def committed_ids(commits: list[Commit]) -> list[str]:
    return [sample.sample_id for commit in commits for sample in commit.samples]


# --- another stitcher, another policy ---


async def test_another_stitcher_gives_samples_under_other_ids_and_a_diff(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    sessions = [played(new_session, index) for index in range(3)]
    commits = [await log_session(session, session.close(stitcher="1")) for session in sessions]
    assert [len(commit.samples) for commit in commits] == [2, 2, 2]
    diff, changes = Diff(), list[SampleChange]()
    report, made = await remake(bus, Recipe(stitcher="2"), diff=diff, on_changes=changes.extend)
    assert report.mismatches == ()
    assert (report.rollouts, report.made.samples, report.made.rewarded) == (3, 3, 3)
    assert report.excluded == {"scenario_title": 3}
    assert report.made.trained_tokens == sum(sampled(session, title=False) for session in sessions)
    assert not set(ids(made)) & set(committed_ids(commits))
    assert {sample.stitcher for delivery in made for sample in delivery.samples} == {"2"}
    assert diff.before.trained_tokens == sum(sampled(session, title=True) for session in sessions)
    assert (diff.rollouts, diff.changed, diff.before.samples, diff.after.samples) == (3, 3, 6, 3)
    assert [change.kinds for change in changes] == [("removed",)] * 3
    assert [change.trained_less for change in changes] == [len(session.calls[2].sampled) for session in sessions]
    assert all(change.before and change.before.branch == 1 and change.after is None for change in changes)


async def test_the_same_stitcher_and_policy_change_nothing(bus: Bus, new_session: Any, log_session: Any) -> None:
    session = played(new_session, 0)
    commit = await log_session(session, session.close(stitcher="2"))
    for recipe in (Recipe(), Recipe(stitcher="2"), Recipe(policy=SamplePolicy()), Recipe(recover=True)):
        diff = Diff()
        report, made = await remake(bus, recipe, diff=diff)
        assert ids(made) == committed_ids([commit])
        assert (diff.changed, diff.kinds, report.mismatches) == (0, {}, ())


async def test_another_policy_gives_samples_under_other_ids_and_a_diff(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    session = played(new_session, 0)
    commit = await log_session(session, session.close(stitcher="2"))
    assert len(commit.samples) == 1
    diff, changes = Diff(), list[SampleChange]()
    policy = SamplePolicy(scenarios=("main", "title"), reward="split")
    report, made = await remake(bus, Recipe(policy=policy), diff=diff, on_changes=changes.extend)
    assert len(ids(made)) == 2
    assert not set(ids(made)) & set(committed_ids([commit]))
    assert [change.kinds for change in changes] == [("reward",), ("added",)]
    before, after = changes[0].before, changes[0].after
    assert before
    assert after
    assert (before.reward, after.reward) == (1.0, 0.5)
    assert changes[1].trained_more == len(session.calls[2].sampled)
    assert (report.made.rewarded, report.made.reward_sum, report.excluded) == (1, 1.0, {})


async def test_samples_that_are_cut_are_seen_in_the_diff(bus: Bus, new_session: Any, log_session: Any) -> None:
    session = played(new_session, 0)
    await log_session(session, session.close(stitcher="2"))
    whole = len(session.calls[3].ids)
    diff = Diff()
    report, made = await remake(bus, Recipe(policy=SamplePolicy(max_tokens=whole - 1)), diff=diff)
    assert list(diff.kinds) == ["trained_less", "tokens"]
    assert diff.kinds["trained_less"].trained_tokens == 1
    assert made[0].samples[0].cut_tokens == 1
    assert report.made.trained_tokens == diff.before.trained_tokens - 1


async def test_a_policy_is_heard_also_where_version_1_made_the_samples(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    session = played(new_session, 0)
    await log_session(session, session.close(stitcher="1"))
    _, made = await remake(bus, Recipe(policy=SamplePolicy(scenarios=("title",))))
    (sample,) = made[0].samples
    assert (sample.stitcher, sample.scenario) == ("2", "title")
    _, made = await remake(bus, Recipe(stitcher="1", policy=SamplePolicy(scenarios=("title",))))
    assert {sample.stitcher for sample in made[0].samples} == {"1"}


async def test_a_diff_against_samples_that_the_log_does_not_reproduce_says_so(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    def lower(event: Any) -> Any:
        return structs.replace(event, reward=0.0) if getattr(event, "kind", "") == "evaluated" else event

    session = played(new_session, 0)
    commit = await log_session(session, session.close(stitcher="2"), lower)
    diff = Diff()
    for wanted in ({"diff": diff}, {}):
        recipe = Recipe(stitcher="1") if wanted else Recipe()
        report, _ = await remake(bus, recipe, **wanted)
        assert [(each.sample_id, each.problem) for each in report.mismatches] == [
            (commit.samples[0].sample_id, "differs")
        ]
    assert diff.before.reward_sum == 0.0


async def test_a_rollout_that_cannot_be_read_keeps_no_other_from_its_samples(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    session = played(new_session, 0)
    commit = await log_session(session, session.close(stitcher="2"))
    broken = Rollout.of("run", "task", 5, 9).rollout_id
    await bus.publish(subjects.log_subject("run", broken, "call"), b"\xc1")
    await bus.create(subjects.log_subject("run", broken, "commit"), encode(structs.replace(commit, rollout_id=broken)))
    strange = Rollout.of("run", "task", 6, 9).rollout_id
    other = structs.replace(commit, rollout_id=strange, stitcher="77")
    await bus.create(subjects.log_subject("run", strange, "commit"), encode(other))
    report, made = await remake(bus, Recipe(policy=SamplePolicy(min_trained_tokens=2)))
    assert [delivery.rollout_id for delivery in made] == [commit.rollout_id]
    assert [(each.rollout_id, each.problem) for each in report.mismatches] == [
        (broken, "unreadable"),
        (strange, "unreadable"),
    ]
    assert "stitched by version 77" in report.mismatches[1].detail
    assert (report.rollouts, report.made.rollouts) == (3, 1)


# --- rollouts that were given up ---


def give_up(session: Any, **changes: Any) -> Commit:
    commit: Commit = session.close(stitcher="2", status="failed", failure=GAVE_UP, cut_seq=0, **changes)
    return commit


async def test_a_rollout_that_was_given_up_gets_the_samples_that_it_would_have_had(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    session = played(new_session, 0)
    truth = await log_session(session, session.close(stitcher="2"))
    same = played(new_session, 0)
    same.rollout = Rollout.of("run", "task", 1, 9)
    given_up = await log_session(same, give_up(same))
    assert given_up.samples == ()
    diff = Diff()
    report, (whole, recovered) = await remake(bus, Recipe(recover=True), diff=diff)
    assert (report.recovered, report.mismatches) == (1, ())
    assert ids([whole]) == committed_ids([truth])
    assert (recovered.status, recovered.failure, recovered.reward) == ("completed", None, 1.0)
    (sample,), (expected,) = recovered.samples, whole.samples
    assert sample.sample_id != expected.sample_id
    assert (sample.token_ids, sample.loss_mask, sample.logprobs) == (
        expected.token_ids,
        expected.loss_mask,
        expected.logprobs,
    )
    assert (sample.reward, sample.timings, sample.calls) == (1.0, expected.timings, expected.calls)
    assert (diff.changed, diff.kinds["added"].trained_tokens) == (1, sampled(session, title=False))


async def test_without_recover_a_rollout_that_was_given_up_stays_without_samples(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    session = played(new_session, 0)
    await log_session(session, give_up(session))
    for recipe in (Recipe(), Recipe(policy=SamplePolicy(failed="keep"))):
        report, made = await remake(bus, recipe)
        assert (report.recovered, made[0].samples, made[0].status) == (0, (), "failed")


async def test_recovery_obeys_the_last_transition_and_the_calls_without_an_end(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    truncated = played(new_session, 0)
    truncated.ask(truncated.calls[3], outcome="lost")
    commit = give_up(truncated)
    too_late = Failure.of("agent_budget", "the agent was still running after 9 s")
    truncated.events = [
        (seq, structs.replace(event, status="truncated", failure=too_late))
        if isinstance(event, RolloutEvent) and event.kind == "ran"
        else (seq, event)
        for seq, event in truncated.events
    ]
    await log_session(truncated, commit)

    failed = played(new_session, 1)
    commit = give_up(failed, evaluated_seq=0)
    judged = Failure.of("eval", "the rule failed")
    failed.events = [
        (seq, structs.replace(event, kind="failed", failure=judged, reward=None))
        if isinstance(event, RolloutEvent) and event.kind == "evaluated"
        else (seq, event)
        for seq, event in failed.events
    ]
    await log_session(failed, commit)

    report, (first, second) = await remake(bus, Recipe(recover=True, policy=SamplePolicy(failed="keep")))
    assert report.recovered == 2
    assert (first.status, first.failure, first.reward) == ("truncated", too_late, 1.0)
    assert first.excluded == {"scenario_title": 1, "lost": 1}
    assert first.samples[0].incomplete
    assert (second.status, second.failure, second.reward) == ("failed", judged, None)
    assert second.samples[0].reward is None


async def test_what_never_ran_or_was_not_given_up_is_not_recovered(
    bus: Bus, new_session: Any, log_session: Any
) -> None:
    never = new_session(random.Random(0), rollout=Rollout.of("run", "task", 0, 9))
    commit = structs.replace(give_up(never), closed_seq=0, evaluated_seq=0)
    never.events = [(seq, event) for seq, event in never.events if event.kind == "initialized"]
    await log_session(never, commit)
    lost = played(new_session, 1)
    await log_session(lost, structs.replace(give_up(lost), failure=Failure.of("llm", "no model")))
    report, made = await remake(bus, Recipe(recover=True))
    assert (report.recovered, [delivery.status for delivery in made]) == (0, ["failed", "failed"])
    assert report.made.samples == 0


# --- files ---


async def test_the_files_are_those_of_the_sink(
    bus: Bus, new_session: Any, log_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_folder, "MAX_ROLLOUTS", 3)
    commits = []
    for index in range(3):
        session = played(new_session, index)
        commits.append(await log_session(session, session.close(stitcher="2")))
    lost = played(new_session, 3)
    commits.append(await log_session(lost, give_up(lost)))
    last = played(new_session, 4)
    commits.append(await log_session(last, last.close(stitcher="2")))
    folder = tmp_path / "made" / "samples"
    with SampleFolder.new(folder) as made:
        report = await remake_run(BusLog(bus), "run", Recipe(), write=made.add)
        assert not folder.exists()
        made.finish({"report": report})
    seqs = [stored.seq async for stored in bus.read(subjects.LOG, "log.run.*.commit")]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "replay.json",
        f"rollouts/run=run/part-{seqs[0]}-{seqs[2]}.parquet",
        f"rollouts/run=run/part-{seqs[3]}-{seqs[4]}.parquet",
        f"run=run/part-{seqs[0]}-{seqs[2]}.parquet",
        f"run=run/part-{seqs[3]}-{seqs[4]}.parquet",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["samples"]
    with connect(folder) as connection:
        rows = connection.execute("SELECT rollout_id, status, stream_seq FROM rollouts ORDER BY stream_seq").fetchall()
        count = connection.execute("SELECT count(*), sum(trained_tokens) FROM samples").fetchone()
    assert rows == [(commit.rollout_id, commit.status, seq) for commit, seq in zip(commits, seqs, strict=True)]
    assert count == (4, report.made.trained_tokens)
    (found,) = find_samples(folder, commits[0].samples[0].sample_id)
    assert found.rollout_id == commits[0].rollout_id


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with (
            pytest.raises(SetupError, match=r"holds something already \(give --out a new folder"),
            SampleFolder.new(tmp_path / name),
        ):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
    (tmp_path / "empty").mkdir()
    with SampleFolder.new(tmp_path / "empty") as made:
        made.finish({"run": "r"})
    assert (tmp_path / "empty/replay.json").is_file()


def test_nothing_is_left_of_a_folder_that_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), SampleFolder.new(tmp_path / "made"):
        raise RuntimeError("the bus went away")
    assert list(tmp_path.iterdir()) == []
