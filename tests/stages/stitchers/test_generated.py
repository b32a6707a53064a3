"""What holds of any session, by the generator of tests/stages, which knows neither gateway nor template."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit_play import shuffled
from msgspec import structs

from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.sample import Sample
from rollyard.stages.stitchers.forest import grow
from rollyard.stages.stitching import outcome_of

RANDOMS = st.randoms(use_true_random=False)
SEEDS = st.integers(0, 1 << 32)


def numbered(samples: Sequence[Sample]) -> list[list[str]]:
    return [list(sample.calls) for sample in samples]


@settings(max_examples=100, deadline=None)
@given(rng=RANDOMS, turns=st.integers(1, 40), unique=st.booleans())
def test_generated_sessions_train_every_counted_token_once(
    new_session: Any, rng: random.Random, turns: int, unique: bool
) -> None:
    """Without `unique` a few ids come again and again, so that much matches by chance."""
    session = new_session(rng, unique=unique).play(turns)
    calls = {call.call_id: call for call in session.calls}
    samples = outcome_of(session.events, session.close(stitcher="2")).samples
    excluded = grow(calls_only(session.events)).excluded
    trained: Counter[str] = Counter()
    for sample in samples:
        last = calls[sample.calls[-1]]
        assert sample.token_ids.tolist() == last.ids
        for span in sample.turns:
            call = calls[span.call_id]
            assert sample.token_ids.tolist()[: span.end] == call.ids
            assert span.end - span.start == len(call.sampled)
            assert set(sample.loss_mask.tolist()[span.start : span.end]) == {int(span.trained)}
            if span.trained:
                assert call.call_id not in trained
                assert sample.logprobs.tolist()[span.start : span.end] == call.logprobs
                trained[call.call_id] = len(call.sampled)
    assert trained == {call_id: len(call.sampled) for call_id, call in calls.items() if call_id not in excluded}
    if unique:
        assert numbered(samples) == session.walks()
        assert excluded == {
            call.call_id: "dead" if call.dead else call.outcome for call in session.calls if not call.counted
        }


@settings(max_examples=60, deadline=None)
@given(rng=RANDOMS, turns=st.integers(1, 40), unique=st.booleans())
def test_generated_sessions_in_any_order(new_session: Any, rng: random.Random, turns: int, unique: bool) -> None:
    session = new_session(rng, unique=unique).play(turns)
    commit = session.close(stitcher="2")
    assert outcome_of(shuffled(session.events, rng), commit) == outcome_of(session.events, commit)


@settings(max_examples=4, deadline=None)
@given(seed=SEEDS)
def test_generated_sessions_of_200_turns(new_session: Any, seed: int) -> None:
    rng = random.Random(seed)
    session = new_session(rng).play(200)
    commit = session.close(stitcher="2")
    outcome = outcome_of(session.events, commit)
    assert numbered(outcome.samples) == session.walks()
    assert outcome_of(shuffled(session.events, rng), commit) == outcome


@settings(max_examples=20, deadline=None)
@given(rng=RANDOMS, turns=st.integers(1, 12))
def test_of_two_records_of_a_call_the_first_counts(new_session: Any, rng: random.Random, turns: int) -> None:
    """Whoever gave a call up logged an end too, later. In whatever order they are read."""
    session = new_session(rng).play(turns)
    commit = session.close(stitcher="2")
    expected = outcome_of(session.events, commit)
    ends = [event for _, event in session.events if isinstance(event, CallEnd)]
    late = [(commit.cut_seq, structs.replace(event, status="aborted", reply=None)) for event in ends]
    assert outcome_of([*session.events, *late], commit) == expected
    assert outcome_of([*late, *session.events], commit) == expected


def calls_only(events: Sequence[Any]) -> list[tuple[int, CallIntent | CallEnd]]:
    return [(seq, event) for seq, event in events if isinstance(event, CallIntent | CallEnd)]
