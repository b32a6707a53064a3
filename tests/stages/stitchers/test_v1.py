from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.digest import sample_digest
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.errors import ReplayError
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.sample import Sample
from rollyard.stages.calls import open_calls, resolve
from rollyard.stages.stitchers.v1 import stitch
from rollyard.stages.stitching import samples_of

RANDOMS = st.randoms(use_true_random=False)
TURNS = st.integers(1, 30)


def calls_only(events: list[Any]) -> list[tuple[int, CallEvent]]:
    return [(seq, event) for seq, event in events if isinstance(event, CallIntent | CallEnd)]


def shuffled_with_duplicates(events: list[Any], rng: random.Random) -> list[Any]:
    late = max(seq for seq, _ in events) + 1
    doubled = [*events, *rng.sample(events, len(events) // 2)]
    # A gateway that repeats itself stores the same record again, at a later sequence.
    doubled += [(late + n, event) for n, (_, event) in enumerate(rng.sample(events, len(events) // 3))]
    rng.shuffle(doubled)
    return doubled


@settings(max_examples=80, deadline=None)
@given(rng=RANDOMS, turns=TURNS)
def test_resolve_restores_what_deltas_left_out(new_session: Any, rng: random.Random, turns: int) -> None:
    session = new_session(rng).play(turns)
    records = resolve(calls_only(session.events))
    assert [record.intent.call_id for record in records] == [call.call_id for call in session.calls]
    for record, call in zip(records, session.calls, strict=True):
        assert record.broken is None
        assert record.messages == call.messages
        assert record.tools == [{"name": "shell"}]
        assert (record.end is None) == (call.outcome == "lost")
        if record.end is not None:
            assert record.prompt_ids.tolist() == call.prompt


@settings(max_examples=80, deadline=None)
@given(rng=RANDOMS, turns=TURNS, unique=st.booleans())
def test_order_and_duplicates_do_not_matter(new_session: Any, rng: random.Random, turns: int, unique: bool) -> None:
    session = new_session(rng, unique=unique).play(turns)
    commit = session.close()
    expected = samples_of(session.events, commit)
    again = samples_of(shuffled_with_duplicates(session.events, rng), commit)
    assert again == expected
    assert [sample_digest(sample) for sample in again] == [sample_digest(sample) for sample in expected]
    plain = stitch(resolve(calls_only(session.events)))
    mixed = stitch(resolve(calls_only(shuffled_with_duplicates(session.events, rng))))
    assert mixed.excluded == plain.excluded
    assert mixed.drift == plain.drift


def check_columns(sample: Sample, by_id: dict[str, Any]) -> dict[str, int]:
    """Everything beside the ids of a sample, position by position; returns how many ids of each call it trains."""
    ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
    logprobs, versions = sample.logprobs.tolist(), sample.policy_versions.tolist()
    assert len(ids) == len(mask) == len(logprobs) == len(versions)
    trained: dict[str, int] = {}
    sampled_positions = set()
    for call_id in sample.calls:
        call = by_id[call_id]
        span = range(len(call.prompt), len(call.ids))
        sampled_positions |= set(span)
        assert ids[: span.stop] == call.ids
        assert {versions[at] for at in span} == {call.version}
        assert len({mask[at] for at in span}) == 1
        if mask[span.start]:
            trained[call_id] = len(span)
            assert [logprobs[at] for at in span] == call.logprobs
    assert all(mask[at] == 0 and versions[at] == -1 for at in range(len(ids)) if at not in sampled_positions)
    assert all(logprobs[at] == 0.0 for at in range(len(ids)) if not mask[at])
    return trained


@settings(max_examples=120, deadline=None)
@given(rng=RANDOMS, turns=TURNS, unique=st.booleans())
def test_every_counted_token_is_trained_exactly_once(
    new_session: Any, rng: random.Random, turns: int, unique: bool
) -> None:
    session = new_session(rng, unique=unique).play(turns)
    by_id = {call.call_id: call for call in session.calls}
    samples = samples_of(session.events, session.close())
    excluded = {each.call_id for each in stitch(resolve(calls_only(session.events))).excluded}
    counted = {call.call_id: len(call.sampled) for call in session.calls if call.call_id not in excluded}
    trained: dict[str, int] = {}
    for sample in samples:
        last = by_id[sample.calls[-1]]
        assert sample.token_ids.tolist() == last.prompt + last.sampled
        assert sample.messages == [*last.messages, last.reply]
        here = check_columns(sample, by_id)
        assert here, "a sample that trains nothing"
        assert not here.keys() & trained.keys()
        trained |= here
    assert trained == counted
    assert sum(sum(sample.loss_mask.tolist()) for sample in samples) == sum(counted.values())


@settings(max_examples=80, deadline=None)
@given(rng=RANDOMS, turns=TURNS)
def test_the_branches_are_those_of_the_agent(new_session: Any, rng: random.Random, turns: int) -> None:
    session = new_session(rng).play(turns)
    samples = samples_of(session.events, session.close())
    assert [list(sample.calls) for sample in samples] == session.walks()
    assert [sample.branch for sample in samples] == list(range(len(samples)))
    assert {sample.branches for sample in samples} <= {len(samples)}
    excluded = {each.call_id: each.reason for each in stitch(resolve(calls_only(session.events))).excluded}
    assert excluded == {
        call.call_id: "dead" if call.dead else call.outcome for call in session.calls if not call.counted
    }


def test_a_linear_session_is_one_sample_of_the_last_prompt_and_reply(new_session: Any) -> None:
    session = new_session(random.Random(1)).play(30, moves=("turn",))
    commit = session.close(reward=0.5)
    (sample,) = samples_of(session.events, commit)
    assert sample.token_ids.tolist() == session.calls[-1].ids
    assert sample.reward == 0.5
    assert sample.timings.initialized_ms == 5
    assert (sample.timings.run_started_ms, sample.timings.run_ended_ms, sample.timings.evaluated_ms) == (10, 20, 30)
    assert sample.logprob_kind == "raw"
    assert sample.finish_reason == "stop"


def test_a_rewritten_history_becomes_a_branch_and_is_reported(new_session: Any) -> None:
    session = new_session(random.Random(2))
    first = session.ask(None)
    session.settle(first)
    second = session.ask(first)
    session.settle(second)
    third = session.ask(second)
    session.settle(third)
    rewritten = [*third.prompt]
    rewritten[len(second.prompt)] += 1_000_000
    (seq, end) = session.events.pop()
    whole = structs.replace(end, shared_prompt_ids=0, prompt_ids=TokenIds.of(rewritten))
    events = [*session.events, (seq, whole)]
    stitched = stitch(resolve(calls_only(events)))
    assert [[call.intent.call_id for call in each.calls] for each in stitched.trajectories] == [
        ["c0", "c1"],
        ["c0", "c2"],
    ]
    assert [each.trained for each in stitched.trajectories] == [(True, True), (False, True)]
    (drift,) = stitched.drift
    assert (drift.call_id, drift.parent, drift.reason) == ("c2", "c1", "unknown")
    assert drift.shared_ids == len(second.prompt)


def test_a_retry_of_the_last_call_leaves_one_reply(new_session: Any) -> None:
    session = new_session(random.Random(3))
    first = session.ask(None)
    session.settle(first)
    session.settle(session.ask(None, again=first))
    samples = samples_of(session.events, session.close())
    assert [sample.calls for sample in samples] == [("c1",)]


def test_concurrent_calls_with_one_prompt_are_siblings(new_session: Any) -> None:
    session = new_session(random.Random(4))
    first = session.ask(None, hold=True)
    second = session.ask(None, again=first, hold=True)
    session.settle(first)
    session.settle(second)
    samples = samples_of(session.events, session.close())
    assert [sample.calls for sample in samples] == [("c0",), ("c1",)]


def test_the_same_reply_twice_is_continued_where_the_intent_says(new_session: Any) -> None:
    session = new_session(random.Random(5))
    first = session.ask(None)
    session.settle(first)
    second = session.ask(None, again=first, sampled=first.sampled)
    session.settle(second)
    session.settle(session.ask(second))
    samples = samples_of(session.events, session.close())
    assert [sample.calls for sample in samples] == [("c1", "c2")]


def test_of_two_ends_the_lower_sequence_counts(new_session: Any) -> None:
    session = new_session(random.Random(6))
    call = session.ask(None)
    session.settle(call)
    seq, end = session.events[-1]
    other = structs.replace(end, status="aborted")
    commit = session.close()
    assert len(samples_of([*session.events, (commit.cut_seq, other)], commit)) == 1
    assert samples_of([(seq - 1, other), *session.events], commit) == ()


def test_only_what_the_commit_lets_in_counts(new_session: Any) -> None:
    session = new_session(random.Random(7)).play(3, moves=("turn",))
    commit = session.close()
    whole = samples_of(session.events, commit)
    late = new_session(random.Random(8), seq=commit.closed_seq).play(1)
    other = new_session(random.Random(9), attempt=2).play(2)
    after = new_session(random.Random(10), seq=commit.cut_seq).play(2)
    renamed = [(seq, structs.replace(event, call_id="late-" + event.call_id)) for seq, event in late.events]
    cut = max(seq for seq, _ in late.events)
    noisy = [*session.events, *renamed, *other.events, *((seq + cut, event) for seq, event in after.events)]
    assert samples_of(noisy, structs.replace(commit, cut_seq=cut)) == whole


def test_an_end_after_the_cut_or_of_a_call_given_up_does_not_count(new_session: Any) -> None:
    session = new_session(random.Random(18)).play(2, moves=("turn",))
    session.ask(session.calls[-1], hold=True)
    commit = session.close(lost_calls=("c2",))
    whole = samples_of(session.events, commit)
    assert [sample.calls for sample in whole] == [("c0", "c1")]
    session.settle(session.calls[-1])
    assert samples_of(session.events, commit) == whole
    assert samples_of(session.events, structs.replace(commit, lost_calls=())) == whole
    later = structs.replace(commit, cut_seq=session.seq)
    assert samples_of(session.events, later) == whole
    assert [s.calls for s in samples_of(session.events, structs.replace(later, lost_calls=()))] == [("c0", "c1", "c2")]


@pytest.mark.parametrize(("status", "count"), [("completed", 1), ("truncated", 1), ("failed", 0), ("cancelled", 0)])
def test_failed_and_cancelled_rollouts_have_no_samples(new_session: Any, status: str, count: int) -> None:
    session = new_session(random.Random(11)).play(4, moves=("turn",))
    samples = samples_of(session.events, session.close(status=status))
    assert [sample.status for sample in samples] == [status] * count


def test_no_calls_no_sample_and_a_missing_reward_is_null(new_session: Any) -> None:
    empty = new_session(random.Random(12))
    assert samples_of(empty.events, empty.close()) == ()
    session = new_session(random.Random(13)).play(1)
    assert samples_of(session.events, session.close(reward=None))[0].reward is None
    assert samples_of(session.events, session.close(evaluated_seq=0))[0].reward is None


def test_a_broken_log_is_marked_not_guessed(new_session: Any) -> None:
    session = new_session(random.Random(14)).play(4, moves=("turn",))
    without_root = [
        (seq, event)
        for seq, event in calls_only(session.events)
        if not (isinstance(event, CallIntent) and event.call_id == "c0")
    ]
    records = {record.intent.call_id: record for record in resolve(without_root)}
    assert records["c0"].broken == "there is an end but no intent"
    assert records["c0"].intent_seq == 0
    assert records["c1"].broken == "parent c0 is not in the log before it"
    assert records["c2"].broken == "parent c1 is broken"
    stitched = stitch(list(records.values()))
    assert stitched.trajectories == ()
    assert stitched.excluded_counts() == {"no_intent": 1, "broken": 3}


def test_a_delta_that_is_larger_than_its_parent_is_broken() -> None:
    same: dict[str, Any] = {"run": "r", "rollout_id": "x", "attempt": 1, "at_ms": 0}
    events: list[tuple[int, CallEvent]] = [
        (1, CallIntent(call_id="a", gateway="g", latest_end_ms=0, **same)),
        (2, CallEnd(call_id="a", status="ok", prompt_ids=TokenIds.of([1]), completion_ids=TokenIds.of([2]), **same)),
        (3, CallIntent(call_id="b", gateway="g", latest_end_ms=0, parent="a", **same)),
        (4, CallEnd(call_id="b", status="ok", shared_prompt_ids=3, completion_ids=TokenIds.of([2]), **same)),
        (5, CallIntent(call_id="c", gateway="g", latest_end_ms=0, parent="a", shared_messages=9, **same)),
    ]
    broken = {record.intent.call_id: record.broken for record in resolve(events)}
    assert broken == {
        "a": None,
        "b": "shares 3 ids, its parent has 2",
        "c": "shares 9 messages, its parent has 0",
    }


@pytest.mark.parametrize(
    ("logprobs", "reason"), [([-1.0], "bad_logprobs"), ([-1.0, float("nan")], "nonfinite_logprobs")]
)
def test_logprobs_that_cannot_be_right_exclude_the_call(logprobs: list[float], reason: str) -> None:
    same: dict[str, Any] = {"call_id": "a", "run": "r", "rollout_id": "x", "attempt": 1, "at_ms": 0}
    ids = TokenIds.of([1, 2])
    end = CallEnd(status="ok", prompt_ids=ids, completion_ids=ids, logprobs=Logprobs.of(logprobs), **same)
    stitched = stitch(resolve([(1, CallIntent(gateway="g", latest_end_ms=0, **same)), (2, end)]))
    assert stitched.excluded_counts() == {reason: 1}


def test_open_calls_are_those_that_an_end_is_owed_for(new_session: Any) -> None:
    session = new_session(random.Random(15))
    session.ask(None, outcome="lost")
    session.settle(session.ask(None))
    closed = session.seq + 1
    session.seq = closed
    session.ask(None, outcome="lost")
    assert [intent.call_id for intent in open_calls(session.events, 1, 0)] == ["c0", "c2"]
    assert [intent.call_id for intent in open_calls(session.events, 1, closed)] == ["c0"]
    assert open_calls(session.events, 2, 0) == []


def test_a_stitcher_that_is_not_here_is_refused(new_session: Any) -> None:
    session = new_session(random.Random(16)).play(1)
    with pytest.raises(ReplayError, match="version 99"):
        samples_of(session.events, session.close(stitcher="99"))


def test_ids_and_digests_are_those_of_the_first_release(new_session: Any) -> None:
    """A change here breaks the replay of every log: a new stitcher version is due."""
    session = new_session(random.Random(20)).play(8, moves=("turn", "fork"))
    samples = samples_of(session.events, session.close())
    round_trip = [decode(encode(sample), Sample) for sample in samples]
    assert [sample_digest(sample) for sample in round_trip] == [sample_digest(sample) for sample in samples]
    assert [(sample.sample_id, sample_digest(sample)) for sample in samples] == [
        ("s681b4d07db96462a1fb87312", "a5b4e4111e6154e2c149bbd4fe2e3aea"),
        ("sacb79e54e8652b0bbc3794b3", "90bf84ef22b1623780bd001888a20e87"),
        ("s8935cb9988c0e4c256b041d4", "03ae2b090603644730e29deb69fbd64b"),
        ("s8232b0d1f451dc7ae56973c9", "d9ecf39c38288f0419874d02bc4b769b"),
    ]
