from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols.responses import ResponsesProtocol, referenced_calls, with_replies
from rollyard.gateway.refusal import Refusal, context_length_exceeded, session_limit
from rollyard.schemas.call import Usage

RESPONSES = ResponsesProtocol()
CALL_ID = "0123456789abcdef0123456789abcdef"
USER = {"role": "user", "content": "hi"}
BASH = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}


def parse(**body: Any) -> ModelRequest:
    return RESPONSES.parse(msgspec.json.encode({"input": "hi", **body}), {})


def refused(**body: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(**body)
    assert caught.value.status == 400
    return caught.value


def whole(request: ModelRequest, finish_reason: str = "stop", **reply: Any) -> Any:
    usage = Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=3, reasoning_tokens=1)
    message = {"role": "assistant", "content": "yes", **reply}
    return msgspec.json.decode(RESPONSES.reply(request, [Finished(CALL_ID, 9, message, finish_reason, usage)]))


def test_what_a_request_says() -> None:
    request = parse(
        model="m",
        instructions="be brief",
        tools=[BASH],
        tool_choice="auto",
        parallel_tool_calls=True,
        stream=True,
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        stop="x",
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "s", "schema": {"a": 1}, "strict": True}},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"thread": "t"},
        metadata={"a": "b"},
        truncation="auto",
        unheard_of={"a": 1},
    )
    assert request.protocol == "responses"
    assert request.model == "m"
    assert [(m["role"], m["content"]) for m in request.messages] == [("system", "be brief"), ("user", "hi")]
    function = {"name": "bash", "description": "", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.params == {"max_tokens": 7, "temperature": 0.0, "top_p": 0.5, "stop": ["x"]}
    assert request.extras == {
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": 1}, "strict": True}},
    }
    assert request.stream
    assert request.include_usage
    assert request.context["metadata"] == {
        "client_metadata": {"thread": "t"},
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
    }


def test_nulls_are_as_good_as_nothing() -> None:
    names = ("instructions", "tools", "tool_choice", "stream", "max_output_tokens", "reasoning", "text", "include")
    nulls = dict.fromkeys((*names, "stop", "previous_response_id", "metadata", "model", "conversation"))
    assert parse(**nulls) == parse()


def test_what_says_nothing_about_tools_where_there_are_none() -> None:
    # As Codex asks for a compaction.
    request = parse(tools=[], tool_choice="auto", parallel_tool_calls=False)
    assert (request.tools, request.extras) == (None, {})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["text"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user", "content": 5}]}, "input[1].content"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "call_id": "c"}]}, "input[0].input"),
        ({"input": [{"type": "tool_search_output", "call_id": "c"}]}, "input[0].tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [BASH, {"name": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [BASH], "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.tools"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": "much"}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], param: str) -> None:
    assert refused(**body).param == param


@given(st.binary())
def test_bytes_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        RESPONSES.parse(body, {})
    assert caught.value.status == 400


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "x"]), inner),
    max_leaves=3,
)
keys = st.sampled_from(
    ["content", "output", "arguments", "call_id", "tools", "action", "summary", "id", "name", "role"]
)
types = st.sampled_from(
    ["message", "reasoning", "function_call", "x_call_output", "local_shell_call", "additional_tools"]
)
items = st.builds(lambda kind, rest: {**rest, "type": kind}, types | values, st.dictionaries(keys, values))


@settings(max_examples=50)
@given(st.lists(items, max_size=3))
def test_whatever_stands_in_items_is_read_or_refused(said: list[Any]) -> None:
    try:
        request = parse(input=said)
    except Refusal as refusal:
        assert refusal.status == 400
        assert refusal.param is not None
    else:
        assert all(isinstance(message["role"], str) for message in request.messages)


tools = st.builds(
    lambda kind, rest: {"name": "n", **rest, "type": kind},
    st.sampled_from(["function", "custom", "namespace", "tool_search", "allowed_tools"]) | values,
    st.dictionaries(st.sampled_from(["name", "description", "parameters", "format", "tools", "mode"]), values),
)


@settings(max_examples=50)
@given(st.lists(tools, max_size=2), tools | values)
def test_whatever_stands_in_tools_is_read_or_refused(said: list[Any], choice: Any) -> None:
    try:
        request = parse(tools=[BASH, *said], tool_choice=choice)
    except Refusal as refusal:
        assert refusal.status == 400
        assert refusal.param is not None
    else:
        assert request.context["echo"]["tools"] == [BASH, *said]


def test_a_whole_reply() -> None:
    request = parse(model="asked", instructions="be brief", tools=[BASH], metadata={"a": "b"}, temperature=0.5)
    body = whole(request)
    assert body == {
        "id": f"resp_{CALL_ID}",
        "object": "response",
        "created_at": 9,
        "status": "completed",
        "model": "asked",
        "error": None,
        "incomplete_details": None,
        "output": [
            {
                "id": f"msg_{CALL_ID}n0",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 9,
        },
        "background": False,
        "instructions": "be brief",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [BASH],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


@pytest.mark.parametrize(
    ("finish_reason", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_a_reply_that_is_cut_is_incomplete(finish_reason: str, reason: str) -> None:
    body = whole(parse(), finish_reason)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert body["output"][0]["status"] == "incomplete"


def test_a_refusal_of_the_model() -> None:
    body = whole(parse(), content=None, refusal="no")
    assert body["output"][0]["content"] == [{"type": "refusal", "refusal": "no"}]
    (echoed,) = parse(input=body["output"]).messages
    assert echoed["refusal"] == "no"


@pytest.mark.parametrize("include", [None, ["reasoning.encrypted_content"]])
@pytest.mark.parametrize("summary", [None, "none", "auto"])
def test_how_reasoning_goes_out(include: list[str] | None, summary: str | None) -> None:
    body = whole(parse(include=include, reasoning={"summary": summary}), reasoning_content="hm")
    reasoning, message = body["output"]
    assert (reasoning["id"], message["id"]) == (f"rs_{CALL_ID}n0", f"msg_{CALL_ID}n1")
    assert ("encrypted_content" in reasoning) == (include is not None)
    assert bool(reasoning["summary"]) == (summary == "auto")
    assert bool(reasoning.get("content")) == (summary != "auto")
    (echoed,) = parse(input=body["output"]).messages
    assert echoed == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_instructions_are_told_from_system_messages_of_the_conversation() -> None:
    said = parse(instructions="new", input=[{"role": "system", "content": "old"}, USER]).messages
    assert [message.get("_instructions", False) for message in said] == [True, False, False]
    said = parse(instructions=[{"role": "developer", "content": "a"}]).messages
    assert said[0] == {"role": "developer", "content": "a", "_instructions": True}


def test_going_on_from_a_response_with_results_only() -> None:
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    asked = parse(previous_response_id=f"resp_{CALL_ID}", input=[result])
    assert asked.messages == [{"role": "tool", "content": "ok", "tool_call_id": "c"}]
    assert asked.context["previous_response_id"] == f"resp_{CALL_ID}"
    assert whole(asked)["previous_response_id"] == f"resp_{CALL_ID}"


def test_items_that_are_only_referred_to() -> None:
    references = [
        {"type": "item_reference", "id": f"{kind}_{CALL_ID}n{n}"} for n, kind in enumerate(("rs", "msg", "fc"))
    ]
    foreign = {"type": "item_reference", "id": "msg_abc"}
    request = parse(
        input=[USER, *references, {"type": "function_call_output", "call_id": "c", "output": "ok"}, foreign]
    )
    assert referenced_calls(request) == [CALL_ID]
    assert request.context["items_left_out"] == [foreign]
    reply = {"role": "assistant", "content": "yes"}
    assert with_replies(request, {CALL_ID: reply}).messages[1] == reply
    with pytest.raises(Refusal, match=f"items of resp_{CALL_ID}"):
        with_replies(request, {})


def refusal_body(refusal: Refusal) -> tuple[int, Any]:
    status, body = RESPONSES.refuse(refusal)
    return status, msgspec.json.decode(body)["error"]


def test_refusals_in_the_vendors_words() -> None:
    status, error = refusal_body(context_length_exceeded(100, 120))
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert error["type"] == "invalid_request_error"
    assert "maximum context length is 100 tokens" in error["message"]
    status, error = refusal_body(Refusal(429, "server_overloaded", "busy", retry_after_s=1))
    assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    status, error = refusal_body(session_limit("max_calls=1"))
    assert (status, error["code"]) == (400, "session_limit_exceeded")
    status, error = refusal_body(Refusal(503, "unavailable", "soon"))
    assert (status, error["type"]) == (503, "server_error")
