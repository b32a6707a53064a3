"""Messages of OpenAI Chat as clients really send them, brought into the one form that the gateway keeps.

Nothing is lost: what has another spelling gets the one spelling, and what is not known stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollyard.gateway.protocols.chat_tools import read_call, read_function
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_PLAIN_ROLES: Final = _ROLES[:-1]
_TEXT_KEYS: Final = frozenset({"role", "content", "name", "tool_call_id", "reasoning_content"})
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of part that hold text, and the key that it stands under."""


def read_messages(messages: list[Message]) -> None:
    """Change messages in place. Raises Refusal (400) that names the field."""
    if not messages:
        raise Refusal(400, "invalid_request", "`messages` is empty", param="messages")
    for index, message in enumerate(messages):
        if not _is_plain(message):
            _read(message, f"messages[{index}]")
            if message["role"] == "function":
                message |= {"role": "tool", "tool_call_id": _last_call(messages[:index])}


def _is_plain(message: Message) -> bool:
    """Whether a message needs no further look, as most do: texts under known names, and calls of functions."""
    for key, value in message.items():
        if type(value) is str:
            if key not in _TEXT_KEYS:
                return False
        elif key == "tool_calls" and type(value) is list:
            if not value or not all(map(_is_plain_call, value)):
                return False
        elif key != "content" or value is not None or message.get("role") != "assistant":
            return False
    return message.get("role") in _PLAIN_ROLES and ("content" in message or message["role"] == "assistant")


def _is_plain_call(call: Any) -> bool:
    function = call.get("function") if type(call) is dict and call.get("type") == "function" else None
    return type(function) is dict and type(function.get("name")) is type(function.get("arguments")) is str


def _read(message: Message, where: str) -> None:
    role = message.get("role")
    if role is None:
        raise Refusal(400, "invalid_request", f"{where} has no role", param=f"{where}.role")
    if role not in _ROLES:
        hint = "it is one of " + ", ".join(_ROLES)
        raise Refusal(400, "invalid_request", f"{where}.role is {str(role)[:80]!r}", hint=hint, param=f"{where}.role")
    for key in [key for key in message if key[:1] == "_"]:
        del message[key]  # keys with an underscore are the gateway's own
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    elif content is None and role != "assistant":
        message["content"] = ""
    elif content is not None and not isinstance(content, str):
        raise _not_text(f"{where}.content")
    _text_or_nothing(message, ("name", "tool_call_id"), where)
    if role == "assistant":
        _read_reply(message, where)


def _part(part: Any, where: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise Refusal(400, "invalid_request", f"{where} has no type", param=f"{where}.type")
    if key := _TEXT_PARTS.get(kind):
        if not isinstance(text := part.get(key), str):
            raise _not_text(f"{where}.{key}")
        if kind == "text":
            return part
        rest = {name: value for name, value in part.items() if name != key}
        return {**rest, "type": "text", "text": text}
    if kind == "image_url" and isinstance(url := part.get("image_url"), str):
        return {**part, "image_url": {"url": url}}
    return part


def _read_reply(message: Message, where: str) -> None:
    """An assistant message: reasoning under one name, tool calls of functions, nulls left out."""
    _text_or_nothing(message, ("reasoning_content", "reasoning", "refusal"), where)
    reasoning = message.pop("reasoning", None)
    if reasoning and not message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    calls, old = message.pop("tool_calls", None), message.pop("function_call", None)
    if calls is not None and not isinstance(calls, list):
        raise Refusal(400, "invalid_request", f"{where}.tool_calls is not a list", param=f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = [read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    elif isinstance(old, dict):
        # The old form has no ids, and some templates want nine characters.
        number = "c" + "".join(filter(str.isdigit, where)).zfill(8)
        function = read_function(old, f"{where}.function_call")
        message["tool_calls"] = [{"id": number, "type": "function", "function": function}]


def _text_or_nothing(message: Message, keys: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in message:
            continue
        if message[key] is None:
            del message[key]
        elif not isinstance(message[key], str):
            raise _not_text(f"{where}.{key}")


def _last_call(messages: list[Message]) -> str:
    """Id of the call that a result without an id answers: the one before it."""
    if not messages or messages[-1]["role"] != "assistant" or "tool_calls" not in messages[-1]:
        return ""
    return str(messages[-1]["tool_calls"][-1].get("id", ""))


def _not_text(where: str) -> Refusal:
    return Refusal(400, "invalid_request", f"{where} is not text", param=where)
