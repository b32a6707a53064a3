from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.collector import Collector
from rollyard.gateway.engines.engine import EngineChunk
from rollyard.schemas.call import Usage
from rollyard.schemas.packed import Logprobs, TokenIds


def piece(ids: list[int], logprobs: list[float] | None = None, **more: object) -> EngineChunk:
    values = [-1.0] * len(ids) if logprobs is None else logprobs
    return EngineChunk(token_ids=TokenIds.of(ids), logprobs=Logprobs.of(values), **more)  # type: ignore[arg-type]


def usage(prompt: int, completion: int) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion)


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=1))
def test_pieces_are_put_together_in_order(pieces: list[list[int]]) -> None:
    collector = Collector("c", 0)
    collector.add(EngineChunk(prompt_ids=TokenIds.of([1, 2])))
    for ids in pieces:
        collector.add(piece(ids, text="x" * len(ids)))
    whole = [number for ids in pieces for number in ids]
    assert collector.completion_ids == TokenIds.of(whole)
    assert collector.reply() == {"role": "assistant", "content": "x" * len(whole)}
    assert collector.usage() == usage(2, len(whole))
    assert (collector.untrainable() is None) == bool(whole)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (piece([5, 6], usage=usage(2, 2)), None),
        (piece([5, 6], usage=usage(2, 3)), "2 sampled ids but a usage of 3"),
        (piece([5, 6], usage=usage(3, 2)), "2 prompt ids but a usage of 3"),
        (piece([5, 6], [-1.0]), "2 sampled ids but 1 logprobs"),
        (piece([5, 6], [-1.0, math.nan]), "a logprob is not a finite number"),
        (piece([5, 6], [-1.0, -math.inf]), "a logprob is not a finite number"),
        (piece([5, 100]), "id 100 is not in the vocabulary of 100"),
        (piece([]), "the server returned no token ids"),
        (piece([5], fault="broken"), "broken"),
    ],
)
def test_what_cannot_be_trained_on(chunk: EngineChunk, reason: str | None) -> None:
    collector = Collector("c", 0, prompt_ids=TokenIds.of([1, 2]), vocab_size=100)
    collector.add(chunk)
    collector.end_segment(7)
    assert collector.untrainable() == reason


def test_logprobs_that_are_wrong_leave_exact_ids() -> None:
    collector = Collector("c", 0, prompt_ids=TokenIds.of([1]))
    collector.add(piece([5], [math.nan]))
    assert collector.inexact() is None


def test_a_server_that_used_another_prompt_is_found_out() -> None:
    collector = Collector("c", 0, prompt_ids=TokenIds.of([1, 2]))
    collector.add(EngineChunk(prompt_ids=TokenIds.of([1, 2])))
    collector.add(piece([5]))
    assert collector.untrainable() is None
    collector.add(EngineChunk(prompt_ids=TokenIds.of([1, 3])))
    assert collector.untrainable() == "the server used another prompt than the one that was sent"
    assert collector.prompt_ids == TokenIds.of([1, 2])


def test_tool_calls_come_in_pieces_and_get_plain_ids() -> None:
    collector = Collector("c", 0)
    deltas = [
        {"index": 0, "id": "chatcmpl-tool-1", "function": {"name": "bash", "arguments": '{"comm'}},
        {"index": 1, "id": "call_2", "function": {"name": "read", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": 'and": "ls"}'}},
    ]
    for delta in deltas:
        assert collector.add(EngineChunk(tool_calls=[delta])) is None
    calls = collector.reply()["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["bash", "read"]
    assert calls[0]["function"]["arguments"] == '{"command": "ls"}'
    assert collector.reply()["content"] is None
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == 2
    assert all(number.isalnum() and len(number) == 9 for number in ids)


def test_a_delta_carries_text_and_reasoning_only() -> None:
    delta = Collector("c", 7).add(EngineChunk(text="a", reasoning="b", tool_calls=[{"index": 0}], finish_reason="stop"))
    assert delta is not None
    assert (delta.call_id, delta.created, delta.text, delta.reasoning) == ("c", 7, "a", "b")


def test_a_reply_that_was_aborted_and_continued_has_a_span_for_each_version() -> None:
    collector = Collector("c", 0, prompt_ids=TokenIds.of([1, 2]), vocab_size=100)
    collector.add(piece([5, 6], usage=usage(2, 2)))
    collector.end_segment(3)
    collector.end_segment(4)
    collector.add(piece([7], usage=usage(4, 1), finish_reason="stop"))
    collector.end_segment(4)
    assert [(span.start, span.end, span.policy_version) for span in collector.spans] == [(0, 2, 3), (2, 3, 4)]
    assert collector.completion_ids == TokenIds.of([5, 6, 7])
    assert collector.untrainable() is None
    assert collector.usage() == usage(2, 3)


def test_what_the_server_says_of_its_weights_counts_more_than_its_entry() -> None:
    collector = Collector("c", 0, prompt_ids=TokenIds.of([1]))
    collector.add(piece([5], policy_version=9))
    collector.end_segment(3)
    collector.add(piece([6]))
    collector.end_segment(3)
    assert [span.policy_version for span in collector.spans] == [9, 3]
