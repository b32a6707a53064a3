from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Waiting
from rollyard.gateway.protocols.messages import MessagesProtocol
from rollyard.gateway.protocols.messages_blocks import signature
from rollyard.gateway.refusal import Refusal, context_length_exceeded, session_closed, unavailable
from rollyard.schemas.call import Usage

MESSAGES = MessagesProtocol()
REQUEST = ModelRequest(protocol="messages", model="asked", messages=[{"role": "user", "content": "hi"}], stream=True)
PROMPT = Usage(prompt_tokens=500, cached_tokens=400)
WHOLE = Usage(prompt_tokens=501, cached_tokens=300, completion_tokens=7)


def call(arguments: str, name: str = "c1") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "Bash", "arguments": arguments}}


def finished(finish_reason: str = "stop", stop_string: str | None = None, **reply: Any) -> Finished:
    return Finished("id", 9, {"role": "assistant", "content": "hi", **reply}, finish_reason, WHOLE, stop_string)


def events(data: bytes) -> list[Any]:
    """Events of a stream, each of which must say its type twice, as the vendor's do."""
    found = []
    for part in data.split(b"\n\n"):
        if part:
            name, _, value = part.partition(b"\ndata: ")
            found.append(msgspec.json.decode(value))
            assert name == b"event: " + found[-1]["type"].encode()
    return found


def body(reply: Finished) -> dict[str, Any]:
    whole: dict[str, Any] = msgspec.json.decode(MESSAGES.reply(REQUEST, [reply]))
    return whole


def test_a_whole_reply() -> None:
    reply = finished("tool_calls", reasoning_content="hm", tool_calls=[call('{ "command": "ls"}')])
    assert body(reply) == {
        "id": "msg_id",
        "type": "message",
        "role": "assistant",
        "model": "asked",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": signature("hm")},
            {"type": "text", "text": "hi"},
            {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 201,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 300,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (finished(), "end_turn", None),
        (finished("length"), "max_tokens", None),
        (finished("length", tool_calls=[call("{}")]), "max_tokens", None),
        (finished("content_filter"), "refusal", None),
        (finished(stop_string="END"), "stop_sequence", "END"),
        (finished("tool_calls", tool_calls=[call("{}")]), "tool_use", None),
        (finished("stop", tool_calls=[call("{}")]), "tool_use", None),
        (finished("tool_calls"), "end_turn", None),
        (finished("abort"), "end_turn", None),
    ],
)
def test_why_a_reply_stopped(reply: Finished, reason: str, sequence: str | None) -> None:
    told = {"stop_reason": reason, "stop_sequence": sequence}
    assert {key: body(reply)[key] for key in told} == told
    assert events(MESSAGES.stream(REQUEST).events(reply))[-2]["delta"] == told


def test_a_stream() -> None:
    stream = MESSAGES.stream(REQUEST)
    assert events(stream.events(Waiting("id", 9))) == [{"type": "ping"}]
    [start] = events(stream.events(Started("id", 9, usage=PROMPT)))
    thinking = events(stream.events(Delta("id", 9, reasoning="h"))) + events(stream.events(Delta("id", 9, "", "m")))
    text = events(stream.events(Delta("id", 9, "hi")))
    end = events(stream.events(finished("tool_calls", reasoning_content="hm", tool_calls=[call('{"a": 1}')])))
    assert start["message"]["usage"]["input_tokens"] == 100
    assert start["message"]["usage"]["cache_read_input_tokens"] == 400
    assert (start["message"]["id"], start["message"]["model"], start["message"]["content"]) == ("msg_id", "asked", [])
    empty = {"type": "thinking", "thinking": "", "signature": ""}
    tool = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {}}
    assert thinking == [
        {"type": "content_block_start", "index": 0, "content_block": empty},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "h"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m"}},
    ]
    assert text == [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "signature_delta", "signature": signature("hm")},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
    ]
    assert end == [
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": tool},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": body(finished())["usage"],
        },
        {"type": "message_stop"},
    ]


def test_blank_text_before_a_call_makes_no_block() -> None:
    stream = MESSAGES.stream(REQUEST)
    assert stream.events(Started("id", 9))
    assert stream.events(Delta("id", 9, "\n")) == b""
    end = events(stream.events(finished("tool_calls", content="\n\n", tool_calls=[call("{}")])))
    assert [event["content_block"]["type"] for event in end if "content_block" in event] == ["tool_use"]
    assert body(finished(content="\n", tool_calls=[call("{}")]))["content"][0]["type"] == "tool_use"


def test_reasoning_after_text_does_not_part_the_text() -> None:
    stream = MESSAGES.stream(REQUEST)
    first = events(stream.events(Delta("id", 9, "a", "one ")))
    assert stream.events(Delta("id", 9, "", "two")) == b""
    rest = events(stream.events(Delta("id", 9, "b"))) + events(
        stream.events(finished(content="ab", reasoning_content="one two"))
    )
    blocks = [event["content_block"]["type"] for event in first + rest if "content_block" in event]
    assert blocks == ["thinking", "text", "thinking"]
    deltas = [event["delta"] for event in rest if event["type"] == "content_block_delta"]
    assert [d.get("text") or d.get("thinking") for d in deltas] == ["b", "two", None]
    assert deltas[2]["signature"] == signature("two")


def test_arguments_that_are_no_object_go_out_as_they_are() -> None:
    for arguments in ('{"a": \U0001f600', "[1]", "plain"):
        reply = finished("tool_calls", tool_calls=[call(arguments)])
        [block] = [block for block in body(reply)["content"] if block["type"] == "tool_use"]
        length = len(arguments.encode("utf-16-le")) // 2
        assert block["input"] == {"__unparsedToolInput": {"raw": arguments, "len": length}}
        parts = [e["delta"].get("partial_json") for e in events(MESSAGES.stream(REQUEST).events(reply)) if "delta" in e]
        assert arguments in parts
    assert body(finished(tool_calls=[call("")]))["content"][-1]["input"] == {}


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "words"),
    [
        (
            context_length_exceeded(9000, 12000),
            400,
            "invalid_request_error",
            "prompt is too long: 12000 tokens > 9000 m",
        ),
        (Refusal(400, "context_length_exceeded", "it is"), 400, "invalid_request_error", "prompt is too long: it is"),
        (Refusal(400, "invalid_request", "x: y"), 400, "invalid_request_error", "x: y"),
        (Refusal(401, "invalid_key", "no"), 401, "authentication_error", "no"),
        (Refusal(403, "forbidden", "no"), 403, "permission_error", "no"),
        (Refusal(404, "not_found", "no"), 404, "not_found_error", "no"),
        (session_closed(), 410, "invalid_request_error", "this session is closed"),
        (Refusal(413, "request_too_large", "no"), 413, "request_too_large", "no"),
        (Refusal(429, "server_overloaded", "no"), 429, "rate_limit_error", "no"),
        (Refusal(500, "internal_error", "no"), 500, "api_error", "no"),
        (Refusal(502, "server_failed", "no"), 502, "api_error", "no"),
        (unavailable("soon"), 529, "overloaded_error", "soon"),
        (Refusal(504, "call_timeout", "no"), 504, "timeout_error", "no"),
    ],
)
def test_refusals(refusal: Refusal, status: int, kind: str, words: str) -> None:
    told, data = MESSAGES.refuse(refusal)
    error = msgspec.json.decode(data)
    assert told == status
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert error["error"]["message"].startswith(words)


def test_an_error_in_mid_stream() -> None:
    stream = MESSAGES.stream(REQUEST)
    stream.events(Delta("id", 9, "", "hm"))
    [error] = events(stream.error(unavailable("it broke")))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "it broke"}}


def test_a_passing_error_behind_a_whole_block_is_a_broken_stream() -> None:
    stream = MESSAGES.stream(REQUEST)
    stream.events(Delta("id", 9, "hi", "hm"))
    assert stream.error(unavailable("it broke")) == b""
    [error] = events(stream.error(session_closed()))
    assert error["error"]["type"] == "invalid_request_error"
