from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols.responses import ResponsesProtocol
from rollyard.schemas.call import Message, Usage

RESPONSES = ResponsesProtocol()
CALL_ID = "0123456789abcdef0123456789abcdef"
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "About agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": {"type": "object"}},
        {"type": "function", "name": "wait"},
        {"type": "custom", "name": "say"},
        {"type": "web_search"},
    ],
}
SHELL = {"type": "local_shell"}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
WEB = {"type": "web_search"}
BASH = {"type": "function", "name": "bash", "strict": True}
ALL = [BASH, PATCH, AGENTS, SHELL, SEARCH, WEB]


def parse(*tools: Any, **body: Any) -> ModelRequest:
    return RESPONSES.parse(msgspec.json.encode({"input": "hi", "tools": tools, **body}), {})


def names(request: ModelRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools or ()]


def items(request: ModelRequest, *calls: tuple[str, Any]) -> list[dict[str, Any]]:
    """The items of a reply with these calls: name and arguments."""
    reply = {"role": "assistant", "content": None, "tool_calls": tool_calls(*calls)}
    whole = RESPONSES.reply(request, [Finished(CALL_ID, 9, reply, "tool_calls", Usage())])
    output: list[dict[str, Any]] = msgspec.json.decode(whole)["output"]
    return output


def tool_calls(*calls: tuple[str, Any]) -> list[Message]:
    said = [(name, args if isinstance(args, str) else msgspec.json.encode(args).decode()) for name, args in calls]
    return [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": args}}
        for n, (name, args) in enumerate(said)
    ]


def test_every_kind_is_a_function() -> None:
    request = parse(*ALL)
    assert names(request) == [
        "bash",
        "apply_patch",
        "agents__spawn",
        "agents__wait",
        "agents__say",
        "local_shell",
        "tool_search",
    ]
    assert request.tools is not None
    bash, patch, spawn, wait, _, _, search = (tool["function"] for tool in request.tools)
    assert bash["strict"] is True
    assert patch["description"] == "Patches files.\n\n`input` must match this lark grammar:\nstart: x"
    assert patch["parameters"]["required"] == ["input"]
    assert spawn["description"] == "About agents.\n\nStarts one."
    assert wait["description"] == ""
    assert search["description"] == "Finds tools."
    assert request.context["tools_left_out"] == [{**AGENTS, "tools": [WEB]}, WEB]


@pytest.mark.parametrize("tool", [WEB, {"type": "tool_search"}, {"type": "mcp", "server_label": "x"}, {"type": "new"}])
def test_a_tool_that_cannot_be_offered_is_kept(tool: dict[str, Any]) -> None:
    request = parse(tool)
    assert (request.tools, request.context["tools_left_out"]) == (None, [tool])
    body = msgspec.json.decode(RESPONSES.reply(request, [Finished(CALL_ID, 9, {"content": "x"}, "stop", Usage())]))
    assert body["tools"] == [tool]


def test_chats_own_form_is_read() -> None:
    assert names(parse({"type": "function", "function": {"name": "f"}})) == ["f"]


def test_names_that_meet() -> None:
    function, custom = {"type": "function", "name": "a__b"}, {"type": "custom", "name": "a__b"}
    space = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}
    request = parse(function, custom, space, function)
    assert names(request) == ["a__b", "a__b_", "a__b__"]
    calls = [(name, {"input": "x"}) for name in names(request)]
    output = items(request, *calls)
    assert [(item["type"], item["name"], item.get("namespace")) for item in output] == [
        ("function_call", "a__b", None),
        ("custom_tool_call", "a__b", None),
        ("function_call", "b", "a"),
    ]
    (echoed,) = parse(function, custom, space, input=output).messages
    assert echoed["tool_calls"] == tool_calls(*calls)


def test_a_namespace_that_brings_its_own_underscores() -> None:
    space = {"type": "namespace", "name": "mcp__x__", "tools": [{"type": "function", "name": "f"}]}
    assert names(parse(space)) == ["mcp__x__f"]


def test_calls_go_out_in_their_own_kind() -> None:
    request = parse(*ALL)
    output = items(
        request,
        ("bash", '{"a": 1}'),
        ("apply_patch", {"input": "*** Begin"}),
        ("agents__spawn", {}),
        ("agents__say", {"input": "x"}),
        ("local_shell", {"command": ["ls"], "timeout_ms": 5}),
        ("tool_search", {"query": "q"}),
        ("unheard_of", {}),
    )
    assert [{key: value for key, value in item.items() if key not in ("id", "status")} for item in output] == [
        {"type": "function_call", "call_id": "c0", "name": "bash", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "say", "namespace": "agents", "input": "x"},
        {
            "type": "local_shell_call",
            "call_id": "c4",
            "action": {"type": "exec", "command": ["ls"], "timeout_ms": 5, "env": {}},
        },
        {"type": "tool_search_call", "call_id": "c5", "execution": "client", "arguments": {"query": "q"}},
        {"type": "function_call", "call_id": "c6", "name": "unheard_of", "arguments": "{}"},
    ]
    assert [item["id"] for item in output] == [
        f"{kind}_{CALL_ID}n{n}" for n, kind in enumerate(("fc", "ctc", "fc", "ctc", "lsc", "tsc", "fc"))
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("apply_patch", '{"input": "x"}', "custom_tool_call"),
        ("apply_patch", '{"input": 5}', "custom_tool_call"),
        ("apply_patch", '{"input": "x", "more": 1}', "custom_tool_call"),
        ("apply_patch", '{"input": "x', "custom_tool_call"),
        ("apply_patch", "", "custom_tool_call"),
        ("bash", '{"a": ', "function_call"),
        ("local_shell", '{"command": ["ls"]}', "local_shell_call"),
        ("local_shell", '{"command": "ls"}', "function_call"),
        ("local_shell", '{"command": ["ls"], "env": {}}', "function_call"),
        ("local_shell", '{"command": ["ls"], "user": null}', "function_call"),
        ("local_shell", "oops", "function_call"),
        ("tool_search", '{"query": 1}', "tool_search_call"),
        ("tool_search", '"text"', "tool_search_call"),
        ("tool_search", '{"query', "tool_search_call"),
    ],
)
def test_arguments_that_come_back_are_the_models(name: str, arguments: str, kind: str) -> None:
    output = items(parse(*ALL), (name, arguments))
    assert output[0]["type"] == kind
    if kind == "local_shell_call":  # as Codex echoes it
        output[0]["action"] |= {"working_directory": None, "user": None}
    (echoed,) = parse(*ALL, input=output).messages
    (called,) = echoed["tool_calls"]
    assert called["function"]["name"] == name
    assert called["function"]["arguments"].replace(" ", "") == arguments.replace(" ", "")


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "bash"}, "bash"),
        ({"type": "function", "function": {"name": "bash"}}, "bash"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "web_search"}, None),
        ({"type": "function", "name": "unheard_of"}, None),
        (5, None),
    ],
)
def test_tool_choice(asked: Any, choice: str | None) -> None:
    said = parse(*ALL, tool_choice=asked).extras.get("tool_choice")
    assert said == (
        choice if isinstance(asked, str) or choice is None else {"type": "function", "function": {"name": choice}}
    )


def test_allowed_tools() -> None:
    allowed = [{"type": "function", "name": "bash"}, {"type": "custom", "name": "apply_patch"}, WEB]
    request = parse(*ALL, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert names(request) == ["bash", "apply_patch"]
    assert request.extras["tool_choice"] == "required"


def test_tools_that_a_search_found_can_be_called() -> None:
    found = {"type": "function", "name": "late", "description": "Late.", "defer_loading": True}
    history = [
        {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "q"}},
        {
            "type": "tool_search_output",
            "call_id": "c1",
            "execution": "client",
            "tools": [{**AGENTS, "tools": [found]}, BASH],
        },
    ]
    before, request = parse(SEARCH, BASH), parse(SEARCH, BASH, input=history)
    # The prompt only grows: what was found stands in the result, and the tools stay what they were.
    assert request.tools == before.tools
    told = msgspec.json.decode(request.messages[1]["content"])
    assert [(tool["name"], tool["description"]) for tool in told] == [
        ("agents__late", "About agents.\n\nLate."),
        ("bash", ""),
    ]
    (item,) = items(request, ("agents__late", "{}"))
    assert (item["name"], item["namespace"]) == ("late", "agents")


def test_tools_that_stand_among_the_items() -> None:
    request = parse(
        input=[{"type": "additional_tools", "role": "developer", "tools": [PATCH]}, {"role": "user", "content": "x"}]
    )
    assert names(request) == ["apply_patch"]
    assert len(request.messages) == 1
