from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.protocols.chat import ChatProtocol
from rollyard.gateway.protocols.protocol import Protocol
from rollyard.gateway.refusal import Refusal, context_length_exceeded, unavailable
from rollyard.schemas.call import Usage

CHAT: Protocol = ChatProtocol()
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def parse(*messages: Any, **body: Any) -> ModelRequest:
    return CHAT.parse(msgspec.json.encode({"messages": messages or [USER], **body}), {})


def finished(*, choice: int = 0, finish_reason: str = "stop", **reply: Any) -> Finished:
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3, reasoning_tokens=1)
    message = {"role": "assistant", "content": "hi", **reply}
    return Finished(f"id{choice}", 9, message, finish_reason, usage, choice=choice)


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part if part == b"[DONE]" else msgspec.json.decode(part) for part in parts]


def streamed(request: ModelRequest, *updates: Update) -> list[Any]:
    stream = CHAT.stream(request)
    return events(b"".join(stream.events(update) for update in updates))


def put_together(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream: the message of each choice."""
    messages: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != b"[DONE]" else ():
            message = messages.setdefault(choice["index"], {"finish_reason": None})
            assert message["finish_reason"] is None, "nothing comes after the end"
            message["finish_reason"] = choice["finish_reason"]
            for key, value in choice["delta"].items():
                message[key] = message[key] + value if key in message and isinstance(value, str) else value
    return messages


def test_what_a_request_says() -> None:
    request = parse(
        model="m",
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        max_tokens=1,
        max_completion_tokens=2,
        stop=["x", "", "y"],
        temperature=0,
        top_p="0.5",
        n=3,
        seed=7,
        logit_bias={"50256": -100},
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
        user="somebody",
        metadata={"session_id": "s"},
        prompt_cache_key="k",
        logprobs=True,
        top_logprobs=5,
        unheard_of={"a": 1},
    )
    assert request == ModelRequest(
        messages=[USER],
        model="m",
        tools=[TOOL],
        params={
            "temperature": 0.0,
            "top_p": 0.5,
            "seed": 7,
            "logit_bias": {"50256": -100.0},
            "max_tokens": 2,
            "stop": ["x", "y"],
        },
        extras={
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        n=3,
        stream=True,
        include_usage=True,
        context={"metadata": {"session_id": "s", "user": "somebody", "prompt_cache_key": "k"}},
    )


def test_nulls_are_as_good_as_nothing() -> None:
    names = "tools stream stream_options max_tokens max_completion_tokens stop n seed tool_choice model logit_bias user"
    more = "functions function_call parallel_tool_calls response_format metadata logprobs temperature"
    assert parse(**dict.fromkeys(f"{names} {more}".split())) == parse()
    assert parse(stop="").params == {}
    assert parse(stop="x").params == {"stop": ["x"]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": None}, "messages", "Expected"),
        ({"messages": ["hi"]}, "messages[0]", "Expected `object`"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "no role"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role", "'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "it is one of system"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "not text"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type", "no type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "not text"),
        ({"messages": [{**USER, "name": 1}]}, "messages[0].name", "not text"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls", "not a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "not an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "object"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "not a string",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "not an object"),
        ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name", "not a string"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search', it must be function or custom"),
        ({"functions": [{}]}, "functions[0].name", "not a string"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name", "not a string"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among the tools"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 17}, "n", "the most is 16"),
        ({"n": "two"}, "n", "Expected `int | null`"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
        ({"temperature": "nan"}, "temperature", "finite"),
        ({"stop": ["x", 1]}, "stop[1]", "Expected `str`"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "Expected"),
        ({"response_format": "json"}, "response_format", "Expected"),
    ],
)
def test_what_is_not_acceptable_names_its_field(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        CHAT.parse(msgspec.json.encode({"messages": [USER], **body}), {})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in str(caught.value)


def test_a_whole_reply() -> None:
    reply = finished(content=None, tool_calls=[CALL], reasoning_content="hm", finish_reason="tool_calls")
    body = msgspec.json.decode(CHAT.reply(parse(model="asked"), [reply]))
    assert body == {
        "id": "chatcmpl-id0",
        "object": "chat.completion",
        "created": 9,
        "model": "asked",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [CALL],
                    "reasoning_content": "hm",
                    "reasoning": "hm",
                },
                "finish_reason": "tool_calls",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }


def test_choices_stand_in_order_and_share_one_prompt() -> None:
    body = msgspec.json.decode(CHAT.reply(parse(n=2), [finished(choice=1, content="b"), finished(content="a")]))
    assert [(each["index"], each["message"]["content"]) for each in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["id"] == "chatcmpl-id0"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 4)


def test_what_a_client_gets_it_may_send_back() -> None:
    reply = finished(content=None, tool_calls=[CALL], reasoning_content="hm")
    body = msgspec.json.decode(CHAT.reply(parse(), [reply]))
    [_, again] = parse(USER, body["choices"][0]["message"]).messages
    assert again == reply.reply


def test_a_stream() -> None:
    request = parse(model="asked", stream_options={"include_usage": True})
    chunks = streamed(
        request,
        Started("id0", 9),
        Delta("id0", 9, "h", "hm"),
        Delta("id0", 9),
        finished(tool_calls=[CALL], reasoning_content="hm!"),
    )
    first, text, rest, calls, finish, usage, done = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "h", "reasoning_content": "hm", "reasoning": "hm"}
    assert rest["choices"][0]["delta"] == {"content": "i", "reasoning_content": "!", "reasoning": "!"}
    assert calls["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **CALL}]}
    assert finish["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert done == b"[DONE]"
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks[:-1]} == {("chatcmpl-id0", 9, "asked")}


def test_a_stream_without_usage_and_without_start() -> None:
    chunks = streamed(parse(), finished(content=None, refusal="no"))
    assert put_together(chunks) == {
        0: {"role": "assistant", "content": "", "refusal": "no", "finish_reason": "stop"},
    }
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-1] == b"[DONE]"


def test_silence_is_no_event() -> None:
    stream = CHAT.stream(parse())
    for silence in (stream.events(Waiting("id0", 9)), stream.ping()):
        assert silence.startswith(b":")
        assert silence.endswith(b"\n\n")


def test_a_stream_of_several_choices() -> None:
    request = parse(n=3, stream_options={"include_usage": True})
    chunks = streamed(
        request,
        Started("id1", 9, choice=1),
        Started("id0", 9),
        Delta("id1", 9, "on", choice=1),
        Delta("id0", 9, "ze"),
        finished(choice=1, content="one", finish_reason="length"),
        Delta("id0", 9, "ro"),
        finished(choice=2, content="two"),
        finished(content="zero", tool_calls=[CALL]),
    )
    assert {index: (each["content"], each["finish_reason"]) for index, each in put_together(chunks).items()} == {
        0: ("zero", "stop"),
        1: ("one", "length"),
        2: ("two", "stop"),
    }
    assert chunks.count(b"[DONE]") == 1
    assert chunks[-1] == b"[DONE]"
    assert chunks[-2]["usage"]["completion_tokens"] == 6
    assert {chunk["id"] for chunk in chunks[:-1]} == {"chatcmpl-id1"}


def test_an_error_in_mid_stream() -> None:
    [error] = events(CHAT.stream(parse()).error(Refusal(502, "server_failed", "it broke", hint="mend it")))
    assert error["error"] == {
        "message": "it broke (mend it)",
        "type": "server_error",
        "param": None,
        "code": "server_failed",
    }


@pytest.mark.parametrize(
    ("refusal", "kind", "code"),
    [
        (context_length_exceeded(100, 120), "invalid_request_error", "context_length_exceeded"),
        (Refusal(429, "server_overloaded", "too much"), "rate_limit_error", "rate_limit_exceeded"),
        (unavailable("not now"), "server_error", "unavailable"),
        (Refusal(401, "invalid_api_key", "who?"), "authentication_error", "invalid_api_key"),
    ],
)
def test_errors_have_the_codes_that_clients_know(refusal: Refusal, kind: str, code: str) -> None:
    status, body = CHAT.refuse(refusal)
    error = msgspec.json.decode(body)["error"]
    assert status == refusal.status
    assert (error["type"], error["code"]) == (kind, code)
    assert error["message"] == str(refusal)
