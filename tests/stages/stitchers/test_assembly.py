"""Samples by a policy: what is trained, what is not and why, and who gets the reward."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline.digest import sample_digest
from rollyard.schemas.call import CallEnd, CallIntent, VersionSpan
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.rollout import RolloutEvent
from rollyard.schemas.sample import Commit, Sample
from rollyard.stages.stitchers.outcome import Outcome
from rollyard.stages.stitching import outcome_of

RANDOMS = st.randoms(use_true_random=False)


def made(session: Any, commit: Commit | None = None, **policy: Any) -> Outcome:
    """The outcome of a session under a policy."""
    commit = commit or session.close()
    return outcome_of(session.events, structs.replace(commit, stitcher="2", policy=SamplePolicy(**policy)))


def linear(new_session: Any, turns: int = 4, seed: int = 1) -> Any:
    return new_session(random.Random(seed)).play(turns, moves=("turn",))


def forked(new_session: Any) -> Any:
    """c0, c1, then c2 and c3 both go on from c1."""
    session = new_session(random.Random(5))
    first = session.ask(None)
    second = session.ask(first)
    for _ in range(2):
        session.settle(session.ask(second))
    return session


def with_scenarios(session: Any, **scenarios: str) -> Any:
    session.events = [
        (seq, structs.replace(event, scenario=scenarios.get(event.call_id, "main")))
        if isinstance(event, CallIntent)
        else (seq, event)
        for seq, event in session.events
    ]
    return session


def calls(outcome: Outcome) -> list[tuple[str, ...]]:
    return [sample.calls for sample in outcome.samples]


def trained(sample: Sample) -> int:
    return sample.loss_mask.data.count(1)


def test_scenarios_that_are_not_trained_are_context_or_nothing(new_session: Any) -> None:
    session = with_scenarios(linear(new_session, 4), c1="summary", c3="compaction")
    outcome = made(session)
    (sample,) = outcome.samples
    assert sample.calls == ("c0", "c1", "c2")
    assert sample.token_ids.tolist() == session.calls[2].ids
    assert [(turn.call_id, turn.trained) for turn in sample.turns] == [("c0", True), ("c1", False), ("c2", True)]
    assert trained(sample) == len(session.calls[0].sampled) + len(session.calls[2].sampled)
    assert outcome.excluded == {"scenario_summary": 1, "scenario_compaction": 1}
    assert calls(made(session, scenarios=("main", "summary", "compaction"))) == [("c0", "c1", "c2", "c3")]


def test_spans_say_where_each_call_was_sampled(new_session: Any) -> None:
    session = linear(new_session, 5)
    (sample,) = made(session).samples
    for index, (turn, call) in enumerate(zip(sample.turns, session.calls, strict=True)):
        assert (turn.turn, turn.call_id, turn.params) == (index, call.call_id, None)
        assert sample.token_ids[turn.start : turn.end].tolist() == call.sampled
        assert sample.loss_mask[turn.start : turn.end].tolist() == [1] * len(call.sampled)


def test_a_turn_tells_its_own_parameters_where_they_are_not_those_of_the_last(new_session: Any) -> None:
    session = linear(new_session, 2)
    session.events[0] = (session.events[0][0], structs.replace(session.events[0][1], params={"temperature": 0.2}))
    (sample,) = made(session).samples
    assert sample.params == {"temperature": 1.0}
    assert [turn.params for turn in sample.turns] == [{"temperature": 0.2}, None]


@settings(max_examples=60, deadline=None)
@given(rng=RANDOMS, turns=st.integers(1, 25), limit=st.integers(2, 40), least=st.integers(1, 8))
def test_whatever_the_limits_no_token_is_trained_twice_and_each_call_has_a_fate(
    new_session: Any, rng: random.Random, turns: int, limit: int, least: int
) -> None:
    session = new_session(rng).play(turns)
    commit = session.close()
    free = made(session, commit)
    for too_long in ("cut", "drop"):
        outcome = made(session, commit, max_tokens=limit, min_trained_tokens=least, too_long=too_long)
        spans: Counter[str] = Counter()
        for sample in outcome.samples:
            assert len(sample.token_ids) <= limit
            assert trained(sample) >= least
            spans.update(turn.call_id for turn in sample.turns if turn.trained)
            assert too_long == "cut" or sample.cut_tokens == 0
        assert all(count == 1 for count in spans.values())
        before = sum(free.excluded.values()) + len({call for sample in free.samples for call in sample.calls})
        assert sum(outcome.excluded.values()) + len(spans) == before


def test_cut_keeps_the_start_and_says_how_much_is_gone(new_session: Any) -> None:
    session = linear(new_session, 4)
    last = session.calls[2]
    limit = len(last.prompt) + 1
    (sample,) = made(session, max_tokens=limit).samples
    assert sample.token_ids.tolist() == last.ids[:limit]
    assert len(sample.logprobs) == len(sample.policy_versions) == len(sample.loss_mask) == limit
    assert sample.calls == ("c0", "c1", "c2")
    assert sample.turns[-1].end == limit
    assert sample.cut_tokens == len(session.calls[3].ids) - limit
    assert sample.finish_reason is None
    assert made(session, max_tokens=limit).excluded == {"cut": 1}
    assert made(session, max_tokens=limit, too_long="drop").excluded == {"too_long": 4}


def test_a_cut_within_a_prompt_ends_the_sample_at_the_reply_before(new_session: Any) -> None:
    session = new_session(random.Random(3))
    first = session.ask(None)
    session.settle(first)
    second = session.ask(first)
    session.settle(second)
    assert len(second.prompt) - len(first.ids) > 1
    (sample,) = made(session, max_tokens=len(first.ids) + 1).samples
    assert (sample.calls, sample.token_ids.tolist()) == (("c0",), first.ids)
    assert sample.cut_tokens == len(second.ids) - len(first.ids)


def test_a_dropped_branch_leaves_its_shared_start_to_the_next(new_session: Any) -> None:
    session = forked(new_session)
    longest, other = sorted(session.calls[2:], key=lambda call: -len(call.ids))
    if len(longest.ids) == len(other.ids):
        pytest.fail("the generator made branches of one length")
    outcome = made(session, max_tokens=len(other.ids), too_long="drop")
    (sample,) = outcome.samples
    assert sample.calls == ("c0", "c1", other.call_id)
    assert all(turn.trained for turn in sample.turns)
    assert outcome.excluded == {"too_long": 1}


def test_shared_starts_are_trained_once(new_session: Any) -> None:
    first, second = made(forked(new_session)).samples
    assert [turn.trained for turn in first.turns] == [True, True, True]
    assert [turn.trained for turn in second.turns] == [False, False, True]
    assert (first.branch, second.branch, first.branches) == (0, 1, 2)


@pytest.mark.parametrize("status", ["truncated", "failed"])
def test_keep_mask_and_drop(new_session: Any, status: str) -> None:
    session = linear(new_session)
    commit = session.close(status=status)
    (kept,) = made(session, commit, **{status: "keep"}).samples
    assert (trained(kept) > 0, kept.masked) == (True, "")
    (masked,) = made(session, commit, **{status: "mask"}).samples
    assert (trained(masked), masked.masked, set(masked.logprobs.tolist())) == (0, status, {0.0})
    assert masked.token_ids == kept.token_ids
    assert not any(turn.trained for turn in masked.turns)
    dropped = made(session, commit, **{status: "drop"})
    assert dropped.samples == ()
    assert made(session, session.close(status="cancelled")).samples == ()


def test_a_truncated_rollout_that_is_dropped_says_so(new_session: Any) -> None:
    session = linear(new_session)
    assert made(session, session.close(status="truncated"), truncated="drop").excluded == {"truncated": 4}


def test_who_gets_the_reward(new_session: Any) -> None:
    session = with_scenarios(forked(new_session), c3="sub_agent")
    commit = session.close(reward=0.5)
    rewards = {how: [s.reward for s in made(session, commit, reward=how).samples] for how in ("all", "main", "split")}
    assert rewards == {"all": [0.5, 0.5], "main": [0.5, None], "split": [0.25, 0.25]}
    assert [sample.rollout_reward for sample in made(session, commit, reward="main").samples] == [0.5, 0.5]
    assert [sample.reward for sample in made(session, session.close(reward=None), reward="split").samples] == [None] * 2


def test_rewards_of_turns_go_to_the_main_agents_calls(new_session: Any) -> None:
    session = with_scenarios(linear(new_session, 4), c1="sub_agent")
    commit = session.close()
    seq, event = session.events[-1]
    assert isinstance(event, RolloutEvent)
    session.events[-1] = (seq, structs.replace(event, turn_rewards=(0.25, None, 1.0, 9.0)))
    outcome = made(session, commit)
    assert [turn.reward for turn in outcome.samples[0].turns] == [0.25, None, None, 1.0]
    assert outcome.excluded == {"turn_reward_without_call": 1}


def test_rewards_of_turns_count_the_replies_that_the_agent_had(new_session: Any) -> None:
    session = new_session(random.Random(4))
    first = session.ask(None)
    session.settle(session.ask(first, outcome="untrainable"))
    session.settle(session.ask(first, outcome="error"))
    session.settle(session.ask(first))
    commit = session.close()
    seq, event = session.events[-1]
    session.events[-1] = (seq, structs.replace(event, turn_rewards=(0.1, 0.2, 0.3)))
    (sample,) = made(session, commit).samples
    assert [(turn.call_id, turn.reward) for turn in sample.turns] == [("c0", 0.1), ("c3", 0.3)]


def test_a_branch_that_a_lost_call_continued_is_incomplete(new_session: Any) -> None:
    session = new_session(random.Random(8))
    first = session.ask(None)
    session.settle(session.ask(first))
    session.settle(session.ask(None))
    session.ask(session.calls[1], outcome="lost")
    samples = made(session).samples
    assert [(sample.calls, sample.incomplete) for sample in samples] == [(("c0", "c1"), True), (("c2",), False)]


def test_versions_of_spans_and_a_missing_logprob(new_session: Any) -> None:
    session = new_session(random.Random(3))
    session.settle(session.ask(None, sampled=[7, 8, 9, 10]))
    seq, end = session.events[-1]
    assert isinstance(end, CallEnd)
    spans = (VersionSpan(start=0, end=2, policy_version=7), VersionSpan(start=2, end=99, policy_version=8))
    session.events[-1] = (seq, structs.replace(end, version_spans=spans, logprobs=type(end.logprobs)()))
    (sample,) = made(session).samples
    assert sample.policy_versions.tolist()[-4:] == [7, 7, 8, 8]
    assert all(map(math.isnan, sample.logprobs.tolist()[-4:]))


def test_policy_and_version_make_other_ids_and_the_same_ones_the_same(new_session: Any) -> None:
    session = linear(new_session)
    commit = session.close()
    first, again, other = made(session, commit), made(session, commit), made(session, commit, min_trained_tokens=2)
    assert [sample_digest(sample) for sample in first.samples] == [sample_digest(sample) for sample in again.samples]
    assert first.samples[0].sample_id != other.samples[0].sample_id
    assert first.samples[0].policy == SamplePolicy().digest()
    assert outcome_of(session.events, structs.replace(commit, stitcher="1")).samples[0].sample_id not in (
        first.samples[0].sample_id,
        other.samples[0].sample_id,
    )


def test_ids_and_digests_are_those_of_the_first_release(new_session: Any) -> None:
    """A change here breaks the replay of every log: a new version of the stitcher is due."""
    session = new_session(random.Random(20)).play(8, moves=("turn", "fork", "retry"))
    found = [(sample.sample_id, sample_digest(sample)) for sample in made(session).samples]
    assert found == [
        ("s6f884299d3c499b29bb7e4ad", "02a4f8c96d32413f23a48c6d9a503371"),
        ("s83734d7d2a8966b653f1404d", "6dcd9b07f6781bb4ec90cff7f18467df"),
    ]
