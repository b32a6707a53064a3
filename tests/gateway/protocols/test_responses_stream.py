from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.history import Canonical
from rollyard.gateway.protocols.responses import ResponsesProtocol
from rollyard.gateway.refusal import Refusal, context_length_exceeded, session_closed
from rollyard.schemas.call import Message, Usage

RESPONSES = ResponsesProtocol()
CALL_ID = "0123456789abcdef0123456789abcdef"
TOOLS = [
    {"type": "function", "name": "bash"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client"},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
REPLY = {"role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": [CALL]}


def parse(**body: Any) -> ModelRequest:
    return RESPONSES.parse(msgspec.json.encode({"input": "hi", "tools": TOOLS, "stream": True, **body}), {})


def finished(reply: Message, finish_reason: str = "stop") -> Finished:
    return Finished(CALL_ID, 9, reply, finish_reason, Usage(prompt_tokens=5, completion_tokens=2))


def events(data: bytes) -> list[dict[str, Any]]:
    """Server-sent events, whose names say the same as their data."""
    found = []
    for block in data.split(b"\n\n"):
        if not block or block.startswith(b":"):
            continue
        name, value = block.split(b"\n")
        event = msgspec.json.decode(value.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


def streamed(request: ModelRequest, *updates: Update) -> list[dict[str, Any]]:
    stream = RESPONSES.stream(request)
    return [event for update in updates for event in events(stream.events(update))]


def folded(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The response as a client builds it from everything but the last event, which it is then compared with."""
    items: dict[int, dict[str, Any]] = {}
    done: set[int] = set()
    for event in said[2:-1]:
        kind = event["type"].removeprefix("response.")
        index = event["output_index"]
        if kind == "output_item.added":
            assert index == len(items)
            items[index] = copy.deepcopy(event["item"])
            continue
        item = items[index]
        assert index not in done
        if kind == "output_item.done":
            grown = {key: value for key, value in item.items() if key != "status"}
            assert grown.items() <= event["item"].items()
            items[index] = event["item"]
            done.add(index)
            continue
        assert event["item_id"] == item["id"]
        _grow(item, kind, event)
    assert done == set(items)
    last = said[-1]["response"]
    assert [items[index] for index in sorted(items)] == last["output"]
    return dict(last)


PARTS = {
    "content_part": ("content", "content_index"),
    "reasoning_summary_part": ("summary", "summary_index"),
    "output_text": ("content", "content_index"),
    "refusal": ("content", "content_index"),
    "reasoning_text": ("content", "content_index"),
    "reasoning_summary_text": ("summary", "summary_index"),
}


def _grow(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    name, step = kind.split(".")
    if name in ("function_call_arguments", "custom_tool_call_input"):
        key = name.split("_")[-1]
        if step == "delta":
            item[key] += event["delta"]
        assert step == "delta" or item[key] == event[key]
        return
    where, index = PARTS[name]
    if name.endswith("part") and step == "added":
        assert event[index] == len(item[where])
        item[where].append(event["part"])
    elif name.endswith("part"):
        assert item[where][event[index]] == event["part"]
    else:
        key = "refusal" if name == "refusal" else "text"
        part = item[where][event[index]]
        if step == "delta":
            part[key] += event["delta"]
        assert step == "delta" or part[key] == event[key]


def test_the_events_of_a_reply() -> None:
    request = parse(reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    said = streamed(
        request,
        Started(CALL_ID, 9),
        Delta(CALL_ID, 9, reasoning="h"),
        Delta(CALL_ID, 9, reasoning="m"),
        Delta(CALL_ID, 9, "ye"),
        finished(REPLY),
    )
    assert [event["type"].removeprefix("response.") for event in said] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    assert said[0]["response"]["status"] == said[1]["response"]["status"] == "in_progress"
    assert said[0]["response"]["output"] == []
    assert said[-1]["response"]["id"] == f"resp_{CALL_ID}"
    assert folded(said)["status"] == "completed"


def test_reasoning_as_content() -> None:
    said = streamed(parse(), Delta(CALL_ID, 9, reasoning="hm"), finished({"content": "x", "reasoning_content": "hm"}))
    kinds = [event["type"].removeprefix("response.") for event in said]
    assert kinds[2:5] == ["output_item.added", "content_part.added", "reasoning_text.delta"]
    assert folded(said)["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]


def test_nothing_to_act_on_before_the_end_is_logged() -> None:
    said = streamed(
        parse(), Waiting(CALL_ID, 9), Started(CALL_ID, 9), Delta(CALL_ID, 9, "yes", "hm"), Delta(CALL_ID, 9, " and")
    )
    for event in said:
        assert not event["type"].endswith("done")
        if event["type"] == "response.output_item.added":
            assert event["item"]["type"] in ("reasoning", "message")


def test_signs_of_life() -> None:
    stream = RESPONSES.stream(parse())
    assert stream.ping() == b": ping\n\n"
    assert [event["type"] for event in events(stream.events(Waiting(CALL_ID, 9)))] == [
        "response.created",
        "response.in_progress",
    ]
    assert stream.events(Waiting(CALL_ID, 9)) == b": ping\n\n"
    assert stream.events(Started(CALL_ID, 9)) == b""
    assert stream.events(Delta(CALL_ID, 9)) == b""


def test_a_reply_that_is_cut_is_incomplete() -> None:
    said = streamed(parse(), Delta(CALL_ID, 9, "ye"), finished({"role": "assistant", "content": "yes"}, "length"))
    assert said[-1]["type"] == "response.incomplete"
    last = folded(said)
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["status"] == "incomplete"


def test_a_refusal_of_the_model() -> None:
    said = streamed(parse(), finished({"content": None, "refusal": "no"}, "content_filter"))
    assert "response.refusal.delta" in [event["type"] for event in said]
    assert folded(said)["incomplete_details"] == {"reason": "content_filter"}
    said = streamed(parse(), Delta(CALL_ID, 9, "I"), finished({"content": "I", "refusal": "no"}))
    assert [part["type"] for part in folded(said)["output"][0]["content"]] == ["output_text", "refusal"]


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (context_length_exceeded(1, 2), "context_length_exceeded"),
        (Refusal(429, "server_overloaded", "busy", retry_after_s=3), "rate_limit_exceeded"),
        (Refusal(503, "log_unavailable", "soon", retry_after_s=1), "server_error"),
        (Refusal(502, "server_failed", "it broke"), "server_error"),
        (session_closed(), "invalid_prompt"),
    ],
)
def test_an_error_in_mid_stream(refusal: Refusal, code: str) -> None:
    stream = RESPONSES.stream(parse())
    began = events(stream.events(Started(CALL_ID, 9)))
    (failed,) = events(stream.error(refusal))
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", len(began))
    assert failed["response"]["id"] == f"resp_{CALL_ID}"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == code
    assert str(refusal) in failed["response"]["error"]["message"]
    assert ("try again in 3s" in failed["response"]["error"]["message"]) == (refusal.status == 429)


texts = st.text(max_size=12)
objects = st.dictionaries(texts, texts | st.integers(-5, 5) | st.booleans() | st.none() | st.lists(texts), max_size=2)
arguments = (
    st.fixed_dictionaries({"input": texts}) | st.fixed_dictionaries({"command": st.lists(texts, max_size=2)}) | objects
).map(lambda value: msgspec.json.encode(value).decode()) | texts
names = st.sampled_from(["bash", "patch", "agents__spawn", "local_shell", "tool_search", "unheard_of", "agents__no"])
functions = st.fixed_dictionaries({"name": names, "arguments": arguments})


@st.composite
def replies(draw: st.DrawFn) -> Message:
    reply: Message = {"role": "assistant", "content": draw(texts | st.none())}
    if reasoning := draw(texts):
        reply["reasoning_content"] = reasoning
    if calls := draw(st.lists(functions, max_size=3)):
        reply["tool_calls"] = [{"id": f"c{n}", "type": "function", "function": each} for n, each in enumerate(calls)]
    return reply


@st.composite
def deltas(draw: st.DrawFn, reply: Message) -> list[Delta]:
    """What may have gone out of a reply before it is finished: pieces of both texts, in any mixture."""
    text, reasoning = reply["content"] or "", reply.get("reasoning_content", "")
    pieces: list[Delta] = []
    while text or reasoning:
        some, more = draw(st.integers(0, len(text))), draw(st.integers(0, len(reasoning)))
        if not some and not more:
            break
        pieces.append(Delta(CALL_ID, 9, text[:some], reasoning[:more]))
        text, reasoning = text[some:], reasoning[more:]
    return pieces


@given(
    data=st.data(),
    reply=replies(),
    include=st.sampled_from([[], ["reasoning.encrypted_content"]]),
    summary=st.sampled_from([None, "auto"]),
)
def test_a_reply_that_comes_back_is_the_one_that_was_sent(
    data: st.DataObject, reply: Message, include: list[str], summary: str | None
) -> None:
    request = parse(include=include, reasoning={"summary": summary})
    said = streamed(request, Started(CALL_ID, 9), *data.draw(deltas(reply)), finished(reply))
    whole = msgspec.json.decode(RESPONSES.reply(request, [finished(reply)]))
    last = folded(said)
    assert {**last, "output": None} == {**whole, "output": None}
    assert len(last["output"]) == len(whole["output"])

    user = {"role": "user", "content": "next"}
    results = [
        {"type": "function_call_output", "call_id": call["id"], "output": "ok"} for call in reply.get("tool_calls", ())
    ]
    for output in (last["output"], whole["output"]):
        assert len({item["id"] for item in output}) == len(output)
        messages = parse(input=[*output, *results, user]).messages
        assert [message["role"] for message in messages] == ["assistant", *["tool"] * len(results), "user"]
        assert Canonical().form(messages[0]) == Canonical().form(reply)
        assert messages[0].get("reasoning_content") == reply.get("reasoning_content")
        assert messages[0].get("tool_calls", []) == _respelled(messages[0], reply.get("tool_calls", []))


def _respelled(echoed: Message, calls: list[Any]) -> list[Any]:
    """The calls as sent, with the white space of arguments that came back: some kinds of item hold JSON values."""
    back = echoed.get("tool_calls", [])
    assert len(back) == len(calls)
    return [
        {**call, "function": {**call["function"], "arguments": other["function"]["arguments"]}}
        for call, other in zip(calls, back, strict=True)
    ]


@given(reply=replies())
def test_streamed_in_its_own_order_a_reply_is_the_same_as_whole(reply: Message) -> None:
    request = parse()
    text, reasoning = reply["content"] or "", reply.get("reasoning_content", "")
    said = streamed(
        request, Started(CALL_ID, 9), Delta(CALL_ID, 9, reasoning=reasoning), Delta(CALL_ID, 9, text), finished(reply)
    )
    assert folded(said) == msgspec.json.decode(RESPONSES.reply(request, [finished(reply)]))
