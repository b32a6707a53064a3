from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.protocols.messages import MessagesProtocol
from rollyard.gateway.protocols.messages_blocks import signature
from rollyard.gateway.protocols.messages_count import count_reply, parse_count
from rollyard.gateway.refusal import Refusal
from rollyard.gateway.tokens.template import plain_messages

MESSAGES = MessagesProtocol()
USER = {"role": "user", "content": "hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
texts = st.text(min_size=1, max_size=20)


def parse(*messages: dict[str, Any], **body: Any) -> ModelRequest:
    return MESSAGES.parse(msgspec.json.encode({"messages": messages or [USER], **body}), {})


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool_use(given: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": "Bash", "input": given, **more}


def result(content: Any, name: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **more}


def test_what_a_request_says() -> None:
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    own_keys = {
        "metadata": {"user_id": '{"session_id":"s"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "output_config": {"effort": "medium"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "service_tier": "auto",
        "betas": ["a-2025"],
        "mcp_servers": [],
    }
    request = parse(
        USER,
        model="m",
        system=[text("one"), text("two", **MARK)],
        tools=[{"name": "Bash", "description": "runs", "input_schema": schema, **MARK}],
        stream=True,
        max_tokens=32000,
        temperature=1,
        top_p=0.5,
        top_k=40,
        stop_sequences=["END"],
        container=None,
        unheard_of={"a": 1},
        **own_keys,
    )
    function = {"name": "Bash", "description": "runs", "parameters": schema}
    assert request == ModelRequest(
        protocol="messages",
        model="m",
        messages=[{"role": "system", "content": [text("one"), text("two")]}, USER],
        tools=[{"type": "function", "function": function}],
        params={"max_tokens": 32000, "temperature": 1.0, "top_p": 0.5, "top_k": 40, "stop": ["END"]},
        extras={
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"enable_thinking": True},
            "reasoning_effort": "medium",
        },
        stream=True,
        context={**own_keys, "more": {"unheard_of": {"a": 1}}},
    )


def test_nulls_are_as_good_as_nothing() -> None:
    names = ("system", "tools", "tool_choice", "stream", "max_tokens", "temperature", "stop_sequences", "thinking")
    assert parse(**dict.fromkeys((*names, "metadata", "output_config", "unheard_of"))) == parse()


@pytest.mark.parametrize(
    ("asked", "extras"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"tool_choice": {"type": "tool", "name": "web_search"}}, {}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_settings_in_the_words_of_chat(asked: dict[str, Any], extras: dict[str, Any]) -> None:
    request = parse(tools=[{"name": "f", "input_schema": {}}], **asked)
    assert request.extras == extras
    assert request.context == asked


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_format_of_the_reply(where: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = parse(**{where: {"format": form} if where == "output_config" else form})
    schema = {"name": "reply", "schema": {"type": "object"}, "strict": True}
    assert request.extras == {"response_format": {"type": "json_schema", "json_schema": schema}}


def test_tools_of_the_vendors_servers_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    only = parse(tools=[search], tool_choice={"type": "auto"})
    assert only.tools is None
    assert only.extras == {}
    assert only.context["server_tools"] == [search]
    both = parse(tools=[search, {"type": "custom", "name": "f", "input_schema": {}}])
    assert [tool["function"]["name"] for tool in both.tools or ()] == ["f"]


@pytest.mark.parametrize("shape", [list, "\n".join])
def test_the_billing_line_is_not_for_the_model(shape: Any) -> None:
    lines = ["x-anthropic-billing-header: cc_version=2.1.197.3fa; cc_is_subagent=true;", "Be good."]
    system = shape(lines) if shape is not list else [text(line) for line in lines]
    request = parse(system=system)
    assert request.messages == [{"role": "system", "content": "Be good."}, USER]
    assert request.context == {"billing": lines[:1]}


@pytest.mark.parametrize("system", ["", [], [text("x-anthropic-billing-header: a")]])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert parse(system=system).messages == [USER]


def test_a_system_message_in_between_stays_there() -> None:
    request = parse(USER, {"role": "system", "content": "note"}, {"role": "system", "content": [text("a", **MARK)]})
    assert request.messages[1:] == [{"role": "system", "content": "note"}, {"role": "system", "content": "a"}]


def test_tool_results_come_first_one_message_each() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    request = parse(
        assistant(tool_use({}), tool_use({}, id="t2")),
        user(result("one", is_error=True), result([text("two"), image], "t2", **MARK), text("and now?")),
    )
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert request.messages[1:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "one", "_is_error": True},
        {"role": "tool", "tool_call_id": "t2", "content": [text("two"), url]},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize("content", ["", [], None])
def test_a_tool_result_may_be_empty(content: Any) -> None:
    assert parse(user(result(content))).messages == [{"role": "tool", "tool_call_id": "t1", "content": ""}]


def test_a_reply_in_chat_form() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": signature("hm")}
    request = parse(USER, assistant(thought, text("done", citations=None), tool_use({"command": "ls"}, **MARK)))
    function = {"name": "Bash", "arguments": '{"command":"ls"}'}
    assert request.messages[1] == {
        "role": "assistant",
        "content": "done",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }


def test_arguments_that_were_no_json_are_what_the_model_wrote() -> None:
    whole = {"__unparsedToolInput": {"raw": '{"a": "\U0001f600', "len": 9}}
    cut = {"__unparsedToolInput": {"raw": '{"a": ', "len": 3000}}
    one, other = parse(assistant(tool_use(whole)), assistant(tool_use(cut))).messages
    assert one["tool_calls"][0]["function"]["arguments"] == '{"a": "\U0001f600'
    assert "_blocks" not in one
    assert other["_blocks"] == [{"type": "tool_use", "arguments_length": 3000}]


def test_every_block_is_text_for_a_model_that_takes_only_text() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    blocks: list[dict[str, Any]] = [
        {"type": "document", "title": "notes", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}},
        {"type": "document", "source": {"type": "content", "content": [text("d"), {"type": "image"}]}},
        {"type": "document", "source": pdf},
        {"type": "document", "source": {**pdf, "data": "JVBERi1="}},
        {"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}},
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv", "content": [{"type": "web_search_result"}]},
        {"unheard_of": 1, "type": "mcp_tool_use"},
    ]
    [message] = plain_messages(parse(user(*blocks)).messages)
    notes, list_, one_pdf, other_pdf, link, file, search, unknown = [
        plain_messages(parse(user(block)).messages)[0]["content"] for block in blocks
    ]
    assert message["content"] == "\n".join([notes, list_, one_pdf, other_pdf, link, file, search, unknown])
    assert (notes, list_) == ("notes\n\nabc", "d\n[image]")
    assert one_pdf != other_pdf
    assert "application/pdf" in one_pdf
    assert "https://a.example/b.pdf" in link
    assert "file_1" in file
    assert msgspec.json.decode(search) == blocks[6]
    assert unknown == '{"type":"mcp_tool_use","unheard_of":1}'


def restored(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a message was made of, from the Chat form alone."""
    results = [restored_result(message) for message in messages if message["role"] == "tool"]
    rest = [message for message in messages if message["role"] != "tool"]
    message = rest[0] if rest else {}
    parts = [restored_part(part) for part in as_parts(message.get("content"))]
    calls, thought = list(message.get("tool_calls", ())), message.get("reasoning_content", "")
    usual = ["tool_result"] * len(results) + ["thinking"] * bool(thought) + ["text"] * len(parts)
    blocks = []
    for entry in message.get("_blocks") or [{"type": kind} for kind in [*usual, *["tool_use"] * len(calls)]]:
        match entry["type"]:
            case "tool_result":
                blocks.append(results.pop(0))
            case "text":
                blocks.append(parts.pop(0))
            case "thinking":
                words, thought = thought[: entry.get("chars")], thought[entry.get("chars", len(thought)) :]
                block = {"thinking": words, "signature": signature(words), **entry}
                blocks.append({key: value for key, value in block.items() if key != "chars"})
            case "tool_use":
                call = calls.pop(0)
                arguments = msgspec.json.decode(call["function"]["arguments"])
                blocks.append({"id": call["id"], "name": call["function"]["name"], "input": arguments, **entry})
            case _:
                blocks.append(entry)
    assert not (results or parts or calls)
    return blocks


def as_parts(content: Any) -> list[dict[str, Any]]:
    return [text(content)] if isinstance(content, str) and content else list(content or ())


def restored_result(message: dict[str, Any]) -> dict[str, Any]:
    content = [restored_part(part) for part in as_parts(message["content"])]
    error = {"is_error": True} if message.get("_is_error") else {}
    return result(content, message["tool_call_id"], **error, **message.get("_block", {}))


def restored_part(part: dict[str, Any]) -> dict[str, Any]:
    if "_block" in part or part["type"] == "text":
        block: dict[str, Any] = part.get("_block", part)
        return block
    url = part["image_url"]["url"]
    if data := re.fullmatch("data:(.*);base64,(.*)", url):
        return {"type": "image", "source": {"type": "base64", "media_type": data[1], "data": data[2]}}
    return {"type": "image", "source": {"type": "url", "url": url}}


sources = st.sampled_from(
    [
        {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        {"type": "url", "url": "https://a.example/b.png"},
        {"type": "text", "media_type": "text/plain", "data": "abc"},
        {"type": "file", "file_id": "f1"},
    ]
)
shown = st.one_of(
    st.builds(text, texts),
    st.builds(lambda words: text(words, citations=[{"cited_text": "x"}]), texts),
    st.builds(lambda source: {"type": "image", "source": source}, sources.filter(lambda s: s["type"] != "text")),
    st.builds(lambda source, title: {"type": "document", "source": source, "title": title}, sources, texts),
    st.builds(lambda words: {"type": "server_tool_use", "id": words, "input": {}}, texts),
)
results = st.builds(
    lambda content, name, more: result(content, name, **more),
    st.lists(shown, max_size=2),
    texts,
    st.sampled_from([{}, {"is_error": True}, {"unheard_of": [1]}]),
)
replied = st.one_of(
    shown,
    st.builds(lambda words: {"type": "thinking", "thinking": words, "signature": signature(words)}, texts),
    st.builds(lambda words, sign: {"type": "thinking", "thinking": words, "signature": sign}, texts, texts),
    st.builds(lambda data: {"type": "redacted_thinking", "data": data}, texts),
    st.builds(tool_use, st.dictionaries(texts, texts | st.integers(-9, 9), max_size=2)),
    st.builds(lambda kind: tool_use({}, caller={"type": kind}), texts),
)


@given(st.lists(results | shown, min_size=1, max_size=6))
def test_nothing_of_a_users_message_is_lost(blocks: list[dict[str, Any]]) -> None:
    assert restored(parse(user(*({**block, **MARK} for block in blocks))).messages) == blocks


@given(st.lists(replied, max_size=6))
def test_nothing_of_an_assistants_message_is_lost(blocks: list[dict[str, Any]]) -> None:
    assert restored(parse(assistant(*({**block, **MARK} for block in blocks))).messages) == blocks


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [user(text("a"), {"text": "b"})]}, "messages[0].content[1].type"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user(result([text("a"), {"type": "text", "text": 1}]))]},
            "messages[0].content[0].content[1].text",
        ),
        ({"messages": [user(result(5))]}, "messages[0].content[0].content"),
        (
            {"messages": [user({"type": "image", "source": {"type": "base64"}})]},
            "messages[0].content[0].source.media_type",
        ),
        ({"messages": [assistant({"type": "tool_use", "id": "a", "name": "b"})]}, "messages[0].content[0].input"),
        ({"messages": [assistant({"type": "thinking"})]}, "messages[0].content[0].thinking"),
        ({"system": 5}, "system"),
        ({"system": [text("a"), 5]}, "system[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"stop_sequences": [["a"]]}, "stop_sequences[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {}}, "thinking.type"),
        ({"metadata": "x"}, "metadata"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(Refusal) as refusal:
        MESSAGES.parse(msgspec.json.encode({"messages": [USER], **body}), {})
    assert refusal.value.status == 400
    assert refusal.value.param == field
    assert field.rpartition(".")[2] in str(refusal.value)


@given(st.binary() | st.builds(msgspec.json.encode, st.recursive(st.none() | texts, lambda x: st.lists(x, max_size=2))))
def test_bytes_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        MESSAGES.parse(body, {})
    assert refusal.value.status == 400


def test_a_request_to_count() -> None:
    body = {"model": "m", "messages": [USER], "system": "s", "tools": [{"name": "f", "input_schema": {}}]}
    request = parse_count(msgspec.json.encode(body), {})
    asked = parse(**body)
    assert request.scenario == "count"
    assert (request.messages, request.tools) == (asked.messages, asked.tools)
    assert msgspec.json.decode(count_reply(17)) == {"input_tokens": 17}
