"""Items of a request as messages: each type, and conversations as Codex and OpenClaw send them."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from rollyard.gateway.exchange import Finished
from rollyard.gateway.history import ROOT, Canonical, longest
from rollyard.gateway.protocols.responses import ResponsesProtocol
from rollyard.gateway.protocols.responses_content import seal, unseal
from rollyard.schemas.call import Message, Usage

RESPONSES = ResponsesProtocol()
IDS = [f"{n:032x}" for n in range(1, 9)]
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def messages(*items: Any, **body: Any) -> list[Message]:
    return RESPONSES.parse(msgspec.json.encode({"input": items, **body}), {}).messages


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def output(call_id: str, reply: Message, **body: Any) -> list[dict[str, Any]]:
    """The items of a reply, as an agent keeps them."""
    request = RESPONSES.parse(msgspec.json.encode({"input": "x", **body}), {})
    whole = RESPONSES.reply(request, [Finished(call_id, 9, reply, "stop", Usage())])
    items: list[dict[str, Any]] = msgspec.json.decode(whole)["output"]
    return items


def result(call_id: str, text: str = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "id": "fco_1", "call_id": call_id, "output": text}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        (USER, {"role": "user", "content": "hi"}),
        ({**USER, "role": "developer", "id": "msg_1"}, {"role": "developer", "content": "hi"}),
        ({"role": "system", "content": None}, {"role": "system", "content": ""}),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]},
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": None}]},
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]},
        ),
        (
            {"role": "user", "content": [{"type": "input_smell", "of": "tea"}]},
            {"role": "user", "content": '{"type":"input_smell","of":"tea"}'},
        ),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
            {"role": "assistant", "content": "yes"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "", "refusal": "no"},
        ),
        (
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{ "a":1}'},
            {"role": "assistant", "content": None, "tool_calls": [call("f", '{ "a":1}')]},
        ),
        (
            {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": "{}"},
            {"role": "assistant", "content": None, "tool_calls": [call("n__f", "{}")]},
        ),
        (
            {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "a\nb"},
            {"role": "assistant", "content": None, "tool_calls": [call("f", {"input": "a\nb"})]},
        ),
        (
            {
                "type": "local_shell_call",
                "call_id": "c1",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None},
            },
            {"role": "assistant", "content": None, "tool_calls": [call("local_shell", {"command": ["ls"]})]},
        ),
        (
            {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "q"}},
            {"role": "assistant", "content": None, "tool_calls": [call("tool_search", {"query": "q"})]},
        ),
        (
            {"type": "computer_call", "call_id": "c1", "id": "cu_1", "status": "completed", "action": {"x": 1}},
            {"role": "assistant", "content": None, "tool_calls": [call("computer", {"action": {"x": 1}})]},
        ),
        (result("c1"), {"role": "tool", "content": "ok", "tool_call_id": "c1"}),
        (
            {
                "type": "custom_tool_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": "data:x"},
                ],
            },
            {
                "role": "tool",
                "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}],
                "tool_call_id": "c1",
            },
        ),
        (
            {"type": "local_shell_call_output", "id": "c1", "output": '{"exit":0}'},
            {"role": "tool", "content": '{"exit":0}', "tool_call_id": "c1"},
        ),
        (
            {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a"}]},
            {"role": "tool", "content": '[{"stdout":"a"}]', "tool_call_id": "c1"},
        ),
        (
            {
                "type": "agent_message",
                "author": "/root",
                "recipient": "/root/a",
                "content": [
                    {"type": "input_text", "text": "go"},
                    {"type": "encrypted_content", "encrypted_content": "x"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Message from /root to /root/a:"},
                    {"type": "text", "text": "go"},
                ],
            },
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "content": None},
            {"role": "assistant", "content": None, "reasoning_content": "short"},
        ),
        (
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "long"}]},
            {"role": "assistant", "content": None, "reasoning_content": "long"},
        ),
        (
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": seal("sealed")},
            {"role": "assistant", "content": None, "reasoning_content": "sealed"},
        ),
    ],
)
def test_an_item_is_a_message(item: dict[str, Any], message: Message) -> None:
    assert messages(item) == [message]


def test_reasoning_that_another_vendor_sealed_is_kept() -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    damaged = {"type": "reasoning", "summary": [], "encrypted_content": seal("hm")[:-1]}
    assert messages(USER, item, damaged)[1] == {"role": "assistant", "content": None, "_items": [item, damaged]}


def test_seals() -> None:
    assert unseal(seal("hm ü\n\U0001f600")) == "hm ü\n\U0001f600"
    assert unseal(seal("")) == ""
    assert unseal(seal("hm") + "!") is None
    assert unseal(None) is None


def test_what_no_model_can_take_is_kept_and_hurts_nobody() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    novel = {"type": "brand_new", "x": 1}
    found = {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": []}
    request = RESPONSES.parse(
        msgspec.json.encode(
            {"input": [search, {"role": "assistant", "content": "a"}, novel, USER, found, USER, novel]}
        ),
        {},
    )
    assert request.messages == [
        {"role": "assistant", "content": "a", "_items": [search, novel]},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "hi", "_items": [found]},
    ]
    assert request.context["items_left_out"] == [novel]


def test_one_reply_is_one_message() -> None:
    reply = {
        "role": "assistant",
        "content": "let me see",
        "reasoning_content": "hm",
        "tool_calls": [call("f", "{}", "c1"), call("g", {"a": 1}, "c2")],
    }
    items = output(IDS[0], reply)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert messages(*items, result("c1"), result("c2"))[0] == reply
    bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
    assert messages(*bare, result("c1"), result("c2"))[0] == reply


def test_results_between_the_calls_of_one_reply() -> None:
    reply = {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "c1"), call("g", "{}", "c2")]}
    one, two = output(IDS[0], reply)
    said = messages(one, result("c1"), two, result("c2"))
    assert [message["role"] for message in said] == ["assistant", "tool", "tool"]
    assert said[0] == reply


def test_replies_that_stand_together_stay_apart() -> None:
    first, second = ({"role": "assistant", "content": text} for text in ("a", "b"))
    assert messages(*output(IDS[0], first), *output(IDS[1], second)) == [first, second]
    assert messages(first, second) == [first, second]


def test_a_message_of_several_parts() -> None:
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    (message,) = messages({"role": "assistant", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


class Session:
    """What the gateway knows of calls: their chains, as gateway/sessions.py keeps them."""

    def __init__(self) -> None:
        self.canonical = Canonical()
        self.known: dict[bytes, str] = {}

    def ask(self, items: list[Any], name: str, reply: Message, **body: Any) -> str | None:
        """The call that a request continues."""
        asked = messages(*items, **body)
        parent, _ = longest(self.canonical.fold(ROOT, asked), self.known)
        self.known[self.canonical.fold(ROOT, [*asked, reply])[-1]] = name
        return parent


SYSTEM = [
    {
        "type": "message",
        "id": "msg_00000000-0000-5000-8000-000000000000",
        "role": "developer",
        "content": USER["content"],
    },
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": t} for t in ("skills", "rights")],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
    USER,
]
CODEX: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}


def as_codex_echoes(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    echoed = copy.deepcopy(items)
    for item in echoed:
        if item["type"] == "reasoning":
            item |= {"content": None}
    return echoed


def test_a_history_that_is_appended_to() -> None:
    first: Message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call("f", "{}")]}
    second: Message = {
        "role": "assistant",
        "content": "both",
        "reasoning_content": "hm",
        "tool_calls": [call("f", '{"a": 1}', "c2"), call("f", '{"a": 2}', "c3")],
    }
    session, history = Session(), list(SYSTEM)
    assert session.ask(history, "first", first, **CODEX) is None
    history += [*as_codex_echoes(output(IDS[0], first, **CODEX)), result("c1")]
    assert session.ask(history, "second", second, **CODEX) == "first"
    history += [*as_codex_echoes(output(IDS[1], second, **CODEX)), result("c2"), result("c3")]
    assert session.ask(history, "third", {"role": "assistant", "content": "done"}, **CODEX) == "second"


def test_a_stream_that_broke_after_a_call_was_done() -> None:
    broken: Message = {"role": "assistant", "content": "", "tool_calls": [call("f", "{}")]}
    session = Session()
    session.ask(SYSTEM, "broken", broken, **CODEX)
    again = [*SYSTEM, *output(IDS[0], broken, **CODEX), result("c1")]
    assert session.ask(again, "next", {"role": "assistant", "content": "done"}, **CODEX) == "broken"


def test_a_compaction() -> None:
    session = Session()
    first: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("apply_patch", {"input": "p"}), call("agents__wait", "{}", "c2")],
    }
    tools = [
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]},
    ]
    session.ask(SYSTEM, "first", first, tools=tools)
    # The compaction brings no tools, but the history still holds calls of all kinds.
    history = [*SYSTEM, *output(IDS[0], first, tools=tools), result("c1"), result("c2")]
    summary: Message = {"role": "assistant", "content": "summary"}
    asked = [*history, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "summarise"}]}]
    assert session.ask(asked, "compaction", summary, tools=[]) == "first"
    renewed = [SYSTEM[0], *({**item, "id": "msg_new"} for item in SYSTEM[1:]), {"role": "user", "content": "summary"}]
    assert session.ask(renewed, "window 2", summary, tools=tools) is None


def test_a_sub_agent_beside_its_parent() -> None:
    session = Session()
    main: Message = {"role": "assistant", "content": None, "tool_calls": [call("agents__spawn", "{}")]}
    sub: Message = {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "c9")]}
    task = [SYSTEM[0], {"role": "user", "content": "sub task"}]
    session.ask(SYSTEM, "main 1", main)
    session.ask(task, "sub 1", sub)
    assert session.ask([*SYSTEM, *output(IDS[0], main), result("c1")], "main 2", main) == "main 1"
    assert session.ask([*task, *output(IDS[1], sub), result("c9")], "sub 2", sub) == "sub 1"


def test_an_agent_that_drops_ids_of_items() -> None:
    # As OpenClaw does; it also renames calls and gives arguments in another spelling.
    reply: Message = {"role": "assistant", "content": "a", "tool_calls": [call("f", '{"a": 1}', "c1")]}
    session = Session()
    start = [{"role": "system", "content": "be good"}, USER]
    session.ask(start, "first", reply)
    echoed = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "x1", "name": "f", "arguments": '{"a":1}'},
    ]
    assert session.ask([*start, *echoed, result("x1")], "second", reply) == "first"
