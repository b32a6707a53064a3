"""How messages and tools of OpenAI Chat come in, in all their spellings, and how calls go out in the client's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols.chat import ChatProtocol
from rollyard.schemas.call import Usage

CHAT = ChatProtocol()
USER = {"role": "user", "content": "hi"}


def parse(*messages: Any, **body: Any) -> ModelRequest:
    return CHAT.parse(msgspec.json.encode({"messages": messages or [USER], **body}), {})


def call(name: str = "bash", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def tool(name: str = "bash") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "f"}}


@pytest.mark.parametrize(
    "message",
    [
        USER,
        {"role": "system", "content": "be good", "name": "boss"},
        {"role": "developer", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, AUDIO, FILE, {"type": "unheard_of"}]},
        {"role": "assistant", "content": "hi"},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": [call(), call("ls", '{"a":  1}')]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "unheard_of": {"a": [1]}},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "tool", "content": "out", "tool_call_id": "c1", "name": "bash"},
        {"role": "tool", "content": [{"type": "text", "text": "out"}, IMAGE], "tool_call_id": "c1"},
    ],
)
def test_messages_that_stay_as_they_are(message: dict[str, Any]) -> None:
    assert parse(message).messages == [message]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, {"role": "tool", "content": "", "tool_call_id": "c"}),
        ({"role": "user", "content": ["a"]}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "image_url", "image_url": "u"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "hm", "refusal": None, "name": None},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm"},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [], "function_call": None, "_secret": 1},
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "bash", "arguments": {"a": "ä"}}}]},
            {"role": "assistant", "tool_calls": [call(arguments='{"a": "ä"}')]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash"}}]},
            {"role": "assistant", "tool_calls": [call()]},
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "p", "input": "x"}}],
            },
            {"role": "assistant", "tool_calls": [call("p", '{"input": "x"}')]},
        ),
    ],
)
def test_messages_of_another_spelling(sent: dict[str, Any], kept: dict[str, Any]) -> None:
    assert parse(sent).messages == [kept]


def test_functions_of_old() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    request = parse(
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "out"},
        functions=[function],
        function_call={"name": "f"},
    )
    assert request.tools == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "f"}}
    assert request.extras == {"tool_choice": named, "parallel_tool_calls": False}
    _, asked, result = request.messages
    [made] = asked["tool_calls"]
    assert len(made["id"]) == 9
    assert "function_call" not in asked
    assert result == {"role": "tool", "name": "f", "content": "out", "tool_call_id": made["id"]}

    end = Finished("id", 9, {"role": "assistant", "content": None, "tool_calls": [call("f")]}, "tool_calls", Usage())
    [choice] = msgspec.json.decode(CHAT.reply(request, [end]))["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    stream = CHAT.stream(request).events(end)
    assert b'"delta":{"function_call":{"name":"f","arguments":"{}"}}' in stream
    assert b'"finish_reason":"function_call"' in stream
    assert b"tool_calls" not in stream


@pytest.mark.parametrize("word", ["none", "auto"])
def test_function_call_in_a_word(word: str) -> None:
    assert parse(functions=[{"name": "f"}], function_call=word).extras["tool_choice"] == word
    assert parse(function_call=word, tool_choice=word, parallel_tool_calls=True).extras == {}


NAMED = {"type": "function", "function": {"name": "b"}}


@pytest.mark.parametrize(
    ("choice", "offered", "kept"),
    [
        ("none", ["a", "b"], "none"),
        ("required", ["a", "b"], "required"),
        (NAMED, ["a", "b"], NAMED),
        ({"type": "function", "name": "b"}, ["a", "b"], NAMED),
        ({"type": "custom", "custom": {"name": "b"}}, ["a", "b"], NAMED),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, ["b"], "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, ["b"], "required"),
    ],
)
def test_tool_choice(choice: Any, offered: list[str], kept: Any) -> None:
    request = parse(tools=[tool("a"), tool("b")], tool_choice=choice)
    assert [each["function"]["name"] for each in request.tools or ()] == offered
    assert request.extras["tool_choice"] == kept


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
    custom = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": grammar}}
    request = parse(tools=[tool(), custom], tool_choice={"type": "custom", "custom": {"name": "patch"}})
    _, given = request.tools or []
    assert given["function"]["parameters"]["required"] == ["input"]
    assert "Patches." in given["function"]["description"]
    assert "start: WORD" in given["function"]["description"]

    for arguments, text in (('{"input": "a\\nb"}', "a\nb"), ("not json", "not json"), ('{"else": 1}', '{"else": 1}')):
        reply = {"role": "assistant", "content": None, "tool_calls": [call(), call("patch", arguments)]}
        end = Finished("id", 9, reply, "tool_calls", Usage())
        made = [call(), {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": text}}]
        [choice] = msgspec.json.decode(CHAT.reply(request, [end]))["choices"]
        assert choice["message"]["tool_calls"] == made
        stream = CHAT.stream(request).events(end)
        assert msgspec.json.encode({"index": 1, **made[1]}) in stream
        assert reply["tool_calls"][1] == call("patch", arguments), "the record stays as it is"
