from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started
from rollyard.gateway.protocols.chat import ChatProtocol
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Usage

CHAT = ChatProtocol()
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}


def parse(**body: Any) -> ModelRequest:
    return CHAT.parse(msgspec.json.encode({"messages": [USER], **body}), {})


def finished(**reply: Any) -> Finished:
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)
    return Finished("id", 9, {"role": "assistant", "content": "hi", **reply}, "stop", usage)


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part if part == b"[DONE]" else msgspec.json.decode(part) for part in parts]


def test_what_a_request_says() -> None:
    tools = [{"type": "function"}]
    request = parse(
        model="m",
        tools=tools,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        max_tokens=1,
        max_completion_tokens=2,
        stop="x",
        temperature=0,
        tool_choice="auto",
        response_format={"type": "text"},
        unheard_of={"a": 1},
    )
    assert request == ModelRequest(
        messages=[USER],
        model="m",
        tools=tools,
        params={"temperature": 0.0, "max_tokens": 2, "stop": ["x"]},
        extras={"tool_choice": "auto", "response_format": {"type": "text"}},
        stream=True,
        include_usage=True,
    )


def test_nulls_are_as_good_as_nothing() -> None:
    nulls = dict.fromkeys(("tools", "stream", "stream_options", "max_tokens", "stop", "n", "seed", "tool_choice"))
    assert parse(**nulls) == parse()


@given(st.binary())
def test_bytes_that_are_no_request_are_refused(body: bytes) -> None:
    try:
        request = CHAT.parse(body, {})
    except Refusal as refusal:
        assert refusal.status == 400
    else:
        assert request.messages


def test_a_whole_reply() -> None:
    body = msgspec.json.decode(CHAT.reply(parse(model="asked"), [finished(content=None, tool_calls=[CALL])]))
    assert body["id"] == "chatcmpl-id"
    assert body["object"] == "chat.completion"
    assert body["model"] == "asked"
    assert body["choices"][0]["message"]["tool_calls"] == [CALL]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_a_stream() -> None:
    request = parse(model="asked", stream_options={"include_usage": True})
    stream = CHAT.stream(request)
    [first] = events(stream.events(Started("id", 9)))
    [text] = events(stream.events(Delta("id", 9, "hi", "hm")))
    calls, finish, usage, done = events(stream.events(finished(tool_calls=[CALL])))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "hi", "reasoning_content": "hm"}
    assert calls["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **CALL}]}
    assert finish["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert done == b"[DONE]"
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in (first, text, calls, finish, usage)} == {
        ("chatcmpl-id", 9, "asked")
    }


def test_an_error_in_mid_stream() -> None:
    [error] = events(CHAT.stream(parse()).error(Refusal(502, "server_failed", "it broke", hint="mend it")))
    assert error["error"] == {
        "message": "it broke (mend it)",
        "type": "server_error",
        "param": None,
        "code": "server_failed",
    }
