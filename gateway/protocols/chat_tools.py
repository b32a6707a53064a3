"""Tools of OpenAI Chat: what a request offers and demands, and tool calls in the form that its client speaks.

Inside there are only function tools. A custom tool, which takes free text, is a function with one string, `input`;
`functions` and `function_call` are what tools were called before.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message

_INPUT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class Offer(Struct, frozen=True):
    """The tools of a request in the gateway's form."""

    tools: list[Message] | None
    extras: dict[str, Any]
    custom: frozenset[str]
    legacy: bool


def read_offer(
    tools: list[Message] | None,
    tool_choice: Any,
    parallel: bool | None,
    functions: list[Message] | None,
    function_call: Any,
) -> Offer:
    """Fields of a request's body. Raises Refusal (400) that names the field."""
    legacy = bool(functions) and not tools
    if legacy:
        offered = [_function(each, f"functions[{index}]") for index, each in enumerate(functions or ())]
        choice, where = _of_function_call(function_call), "function_call"
        parallel = False  # a reply in the old form has room for one call
    else:
        offered = [_tool(each, f"tools[{index}]") for index, each in enumerate(tools or ())]
        choice, where = tool_choice, "tool_choice"
    custom = frozenset(each["custom"]["name"] for each in tools or () if each.get("type") == "custom")
    offered, choice = _demand(choice, offered, where)
    extras = {"tool_choice": choice, "parallel_tool_calls": parallel} if offered else {}
    extras = {name: value for name, value in extras.items() if value is not None}
    return Offer(offered or None, extras, custom, legacy)


def read_call(call: Any, where: str) -> Message:
    """A tool call of an earlier reply as a call of a function; arguments are a string. Raises Refusal (400)."""
    if not isinstance(call, dict):
        raise _not_a(where, "an object")
    if isinstance(custom := call.get("custom"), dict) and "function" not in call:
        name, argument = custom.get("name"), custom.get("input")
        if not isinstance(name, str) or not isinstance(argument, str):
            raise _not_a(f"{where}.custom", "a name and an input")
        rest = {key: value for key, value in call.items() if key != "custom"}
        return {**rest, "type": "function", "function": {"name": name, "arguments": as_arguments(argument)}}
    if not isinstance(function := call.get("function"), dict):
        raise _not_a(f"{where}.function", "an object")
    read = read_function(function, f"{where}.function")
    fine = read is function and call.get("type") == "function"
    return call if fine else {**call, "type": "function", "function": read}


def read_function(function: dict[str, Any], where: str) -> dict[str, Any]:
    """The name and arguments of a call. Raises Refusal (400)."""
    if not isinstance(function.get("name"), str):
        raise _not_a(f"{where}.name", "a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function
    if arguments is not None and not isinstance(arguments, dict):
        raise _not_a(f"{where}.arguments", "a string")
    return {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}


def as_arguments(text: str) -> str:
    """The free text of a custom tool as arguments."""
    return json.dumps({"input": text}, ensure_ascii=False)


def written_calls(calls: list[Message], custom: Collection[str]) -> list[Message]:
    """Calls in the client's form: those of its custom tools carry free text."""
    return [_written(call) if call["function"]["name"] in custom else call for call in calls]


def _written(call: Message) -> Message:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        given = None
    # A model that did not keep to the function's form meant its text all the same.
    text = given["input"] if isinstance(given, dict) and isinstance(given.get("input"), str) else arguments
    return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": text}}


def _tool(tool: Message, where: str) -> Message:
    match tool.get("type"):
        case "function":
            if not isinstance(inner := tool.get("function"), dict):
                raise _not_a(f"{where}.function", "an object")
            return {**tool, "function": _named(inner, f"{where}.function")}
        case "custom":
            if not isinstance(inner := tool.get("custom"), dict):
                raise _not_a(f"{where}.custom", "an object")
            described = [inner.get("description"), _format(inner.get("format"))]
            about = "\n\n".join(text for text in described if isinstance(text, str) and text)
            name = _named(inner, f"{where}.custom")["name"]
            return {"type": "function", "function": {"name": name, "description": about, "parameters": _INPUT}}
        case kind:
            raise Refusal(
                400,
                "unsupported_value",
                f"{where}.type is {kind!r}, it must be function or custom",
                hint="the gateway runs no tools of its own",
                param=f"{where}.type",
            )


def _format(value: Any) -> str:
    """What a custom tool's `format` demands of the text, in words: nothing enforces a grammar."""
    grammar = value.get("grammar") if isinstance(value, dict) else None
    if not isinstance(grammar, dict) or not isinstance(grammar.get("definition"), str):
        return ""
    return f"The input follows this grammar ({grammar.get('syntax', 'lark')}):\n{grammar['definition']}"


def _function(function: Message, where: str) -> Message:
    return {"type": "function", "function": _named(function, where)}


def _named(inner: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(inner.get("name"), str) or not inner["name"]:
        raise _not_a(f"{where}.name", "a string")
    return inner


def _of_function_call(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": choice}
    return choice


def _demand(choice: Any, tools: list[Message], where: str) -> tuple[list[Message], Any]:
    """The tools that may be called, and tool_choice as model servers know it. Raises Refusal (400)."""
    if choice is None or choice in ("none", "auto"):
        return tools, choice
    if not tools:
        raise Refusal(400, "invalid_request", f"{where} demands a call, but there are no tools", param=where)
    if choice == "required":
        return tools, choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        # No server knows this form. A model that is not told of the other tools does not call them.
        allowed = choice.get("allowed_tools")
        allowed = allowed if isinstance(allowed, dict) else choice
        if not isinstance(listed := allowed.get("tools"), list) or not listed:
            raise _not_a(f"{where}.tools", "a list of tools")
        names = {_chosen(each, tools, f"{where}.tools") for each in listed}
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        return _demand(allowed.get("mode", "auto"), tools, f"{where}.mode")
    if kind in ("function", "custom"):
        return tools, {"type": "function", "function": {"name": _chosen(choice, tools, where)}}
    raise Refusal(
        400,
        "invalid_request",
        f"{where} is {str(choice)[:80]!r}",
        hint="it is none, auto, required, allowed_tools, or names a tool",
        param=where,
    )


def _chosen(choice: Any, tools: list[Message], where: str) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    inner = choice.get(kind) if isinstance(kind, str) else None
    name = (inner if isinstance(inner, dict) else choice if isinstance(choice, dict) else {}).get("name")
    if not isinstance(name, str):
        raise _not_a(f"{where}.name", "a string")
    if all(tool["function"]["name"] != name for tool in tools):
        raise Refusal(400, "invalid_request", f"{where} names {name!r}, which is not among the tools", param=where)
    return name


def _not_a(where: str, what: str) -> Refusal:
    return Refusal(400, "invalid_request", f"{where} is not {what}", param=where)
