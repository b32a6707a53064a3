"""Whatever stands in a log, the stitcher ends, raises nothing, and makes columns that fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.schemas.call import AgentIds, CallEnd, CallEvent, CallIntent, VersionSpan
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.sample import Commit
from rollyard.stages.stitchers.forest import grow
from rollyard.stages.stitching import outcome_of

NAMES = st.sampled_from(["a", "b", "c", "d"])
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "***", "\ud800", "{", '{"k": 1}']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["text", "function", "id"]), inner),
    max_leaves=4,
)
KEYS = st.sampled_from(["role", "content", "tool_calls", "reasoning_content", "tool_call_id"])
ROLES = st.sampled_from(["user", "assistant", "assistant", "system", "tool"])
MESSAGES = st.dictionaries(KEYS, ODD, max_size=3) | st.builds(
    lambda role, rest: {**rest, "role": role}, ROLES, st.dictionaries(KEYS, ODD, max_size=2)
)
IDS = st.lists(st.integers(0, 2), max_size=4).map(TokenIds.of)
SHARED = st.sampled_from([0, 0, 1, 2, 3, -1])
SAME: dict[str, Any] = {"run": "run", "rollout_id": "x", "attempt": 1, "at_ms": 0}


@st.composite
def intents(draw: Any) -> CallIntent:
    return CallIntent(
        call_id=draw(NAMES),
        gateway="g",
        latest_end_ms=0,
        parent=draw(st.none() | NAMES),
        shared_messages=draw(SHARED),
        messages=draw(st.lists(MESSAGES, max_size=4)),
        tools=draw(st.none() | st.just([]) | st.just([{"name": "t"}])),
        scenario=draw(st.sampled_from(["main", "main", "sub_agent", "compaction", "title"])),
        agent=AgentIds(thread=draw(st.sampled_from(["", "t"])), window=draw(st.sampled_from(["", "1"]))),
        supersedes=draw(st.none() | NAMES),
        drift=draw(st.none() | st.just("history_edited")),
        prompt=draw(st.none() | st.none() | st.just("words")),
        lenience=draw(st.sampled_from([(), ("arguments_parsed",), ("foreign_reply_keys_dropped",)])),
        **SAME,
    )


@st.composite
def ends(draw: Any) -> CallEnd:
    sampled = draw(IDS)
    values = st.sampled_from([-0.5, 0.0, 3.0, float("nan")])
    many = draw(st.sampled_from([0, len(sampled), len(sampled), len(sampled), 1]))
    spans = st.builds(VersionSpan, start=st.integers(-2, 4), end=st.integers(-2, 6), policy_version=st.integers(-1, 9))
    return CallEnd(
        call_id=draw(NAMES),
        status=draw(st.sampled_from(["ok", "ok", "ok", "error", "aborted"])),
        shared_prompt_ids=draw(SHARED),
        prompt_ids=draw(IDS),
        completion_ids=sampled,
        logprobs=Logprobs.of(draw(st.lists(values, min_size=many, max_size=many))),
        reply=draw(st.none() | MESSAGES),
        policy_version=draw(st.sampled_from([None, 3, -4, 1 << 40])),
        version_spans=tuple(draw(st.lists(spans, max_size=2))),
        **SAME,
    )


def fits(events: list[tuple[int, CallEvent]]) -> None:
    """Every call has a fate, and every column the length of its ids."""
    forest = grow(events)
    standing = {call_id for branch in forest.branches for call_id in branch}
    assert standing | forest.excluded.keys() == {event.call_id for _, event in events}
    assert not standing & forest.excluded.keys()
    commit = Commit(
        run="run", task_id="t", group_id="t", group_size=1, rollout_id="x", index=0, attempt=1, status="completed",
        cut_seq=1000, stitcher="2",
    )  # fmt: skip
    for sample in outcome_of(events, commit).samples:
        size = len(sample.token_ids)
        assert len(sample.loss_mask) == len(sample.logprobs) == len(sample.policy_versions) == size
        assert all(0 <= turn.start < turn.end <= size for turn in sample.turns)
        assert any(sample.loss_mask)


@settings(max_examples=400, deadline=None)
@given(events=st.lists(intents() | ends(), min_size=1, max_size=14))
def test_random_records(events: list[CallEvent]) -> None:
    fits([(seq, event) for seq, event in enumerate(events, 1)])


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [100, 500, 900])
def test_contents_too_deep_to_write(levels: int) -> None:
    fits(
        [
            (1, CallIntent(call_id="a", gateway="g", latest_end_ms=0, messages=[{"role": "user"}], **SAME)),
            (2, end("a", [1], [2], {"role": "assistant", "content": deep(levels)})),
            (
                3,
                CallIntent(
                    call_id="b",
                    gateway="g",
                    latest_end_ms=0,
                    messages=[{"role": "user"}, {"role": "assistant", "content": deep(levels + 1)}, {"role": "user"}],
                    **SAME,
                ),
            ),
            (4, end("b", [1, 3], [2], {"role": "assistant"})),
        ]
    )


def end(call_id: str, prompt: list[int], sampled: list[int], reply: Any) -> CallEnd:
    ids = TokenIds.of(prompt), TokenIds.of(sampled)
    return CallEnd(call_id=call_id, status="ok", prompt_ids=ids[0], completion_ids=ids[1], reply=reply, **SAME)


SPACES = " " * 200_000 + "x"
NEVER_CLOSED = "<system-reminder>" * 20_000
MASKS = "***," * 12 + "x"


@pytest.mark.parametrize(
    ("said", "echoed"), [(SPACES, SPACES + " "), (NEVER_CLOSED, NEVER_CLOSED + "."), ("," * 200, MASKS)]
)
def test_texts_that_make_patterns_go_back_and_forth(said: str, echoed: str) -> None:
    """It would not end, were it not linear."""
    user = {"role": "user", "content": "x"}
    told = {"role": "tool", "tool_call_id": "1", "content": said}
    intent: dict[str, Any] = {"gateway": "g", "latest_end_ms": 0, **SAME}
    fits(
        [
            (1, CallIntent(call_id="a", messages=[user, told], **intent)),
            (2, end("a", [1], [2], {"role": "assistant", "content": said})),
            (
                3,
                CallIntent(
                    call_id="b",
                    messages=[user, {**told, "content": echoed}, {"role": "assistant", "content": echoed}, user],
                    **intent,
                ),
            ),
            (4, end("b", [1, 3], [2], {"role": "assistant"})),
        ]
    )
