"""What a chat template accepts, found out by trying, and messages in the form that it accepts.

Templates refuse roles or orders, or, worse, leave messages out without a word. Agents send developer messages, system
messages in the middle of a conversation, and user text behind tool results; none of it may get lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError

Render = Callable[[list[Message]], str]
"""Text of these messages. Raises ModelError."""

_INSTRUCTIONS: Final = ("system", "developer")
_CALL: Final[Message] = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"q": "mark0"}}}
_USER: Final[Message] = {"role": "user", "content": "mark1"}
_REPLY: Final[Message] = {"role": "assistant", "content": "mark2"}
_CALLING: Final[Message] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Final[Message] = {"role": "tool", "content": "mark3", "tool_call_id": "call00000", "name": "f"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a template takes as it is. What it does not take, `adapt` puts in another form."""

    system: bool = True
    """A system message at the start; else it is text of the user."""
    systems: bool = True
    """Several of them; else they are joined."""
    developer: bool = True
    """Developer messages; else they are system messages."""
    system_later: bool = True
    """System messages further on, in their place; else they are text of the user."""
    user_after_user: bool = True
    """Else the two are joined."""
    user_after_tool: bool = True
    """Else the text is added to the tool's result."""
    null_content: bool = False
    """A reply without text has to be null for its calls to be shown; else it is empty."""
    object_arguments: bool = True
    """Tool arguments as objects; else as JSON text."""

    def adapt(self, messages: list[Message]) -> list[Message]:
        """Messages in a form that the template takes, none left out. They are plain, see template.plain_messages."""
        adapted: list[Message] = []
        for suited in map(self._suited, messages):
            message = suited
            last = adapted[-1] if adapted else {}
            leading = last.get("role", "system") in _INSTRUCTIONS
            if message.get("role") in _INSTRUCTIONS:
                if leading and last and not self.systems:
                    adapted[-1] = _joined(last, message)
                    continue
                if not (self.system if leading else self.system_later):
                    message = {**message, "role": "user"}
            if message.get("role") == "user" and last.get("role") in self._closed_to_users():
                adapted[-1] = _joined(last, message)
            else:
                adapted.append(message)
        return adapted

    def _closed_to_users(self) -> set[str]:
        """Roles that no user message may follow."""
        return ({"user"} if not self.user_after_user else set()) | ({"tool"} if not self.user_after_tool else set())

    def _suited(self, message: Message) -> Message:
        if message.get("role") == "developer" and not self.developer:
            message = {**message, "role": "system"}
        if not message.get("content"):
            null = self.null_content and message.get("tool_calls")
            message = {**message, "content": None if null else ""}
        if message.get("tool_calls") and not self.object_arguments:
            message = {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        return message


def dialect_of(source: str, render: Render) -> Dialect:
    """The dialect of a template with this source."""
    system: Message = {"role": "system", "content": "mark4"}
    developer: Message = {"role": "developer", "content": "mark4"}
    objects, texts = _shown(render, [_USER, _CALLING]), _shown(render, [_USER, _with_text_arguments(_CALLING)])
    object_arguments = "mark0" in objects or "mark0" not in texts
    calling = _CALLING if object_arguments else _with_text_arguments(_CALLING)
    tools = _in_order(render, [_USER, calling, _RESULT], "mark3")
    return Dialect(
        system=_in_order(render, [system, _USER], "mark4", "mark1"),
        systems=_in_order(render, [{**system, "content": "mark5"}, system, _USER], "mark5", "mark4", "mark1"),
        # A template that takes any role is no sign that the model was trained with this one.
        developer="developer" in source and _in_order(render, [developer, _USER], "mark4", "mark1"),
        system_later=_in_order(render, [_USER, _REPLY, system, _USER], "mark2", "mark4", "mark1"),
        user_after_user=_in_order(render, [_USER, {**_USER, "content": "mark4"}, _REPLY], "mark1", "mark4"),
        user_after_tool=not tools
        or _in_order(render, [_USER, calling, _RESULT, {**_USER, "content": "mark4"}], "mark3", "mark4"),
        null_content=_needs_null(render, calling),
        object_arguments=object_arguments,
    )


def _shown(render: Render, messages: list[Message]) -> str:
    """What the template writes; "" when it refuses the messages."""
    try:
        return render(messages)
    except ModelError:
        return ""


def _in_order(render: Render, messages: list[Message], *marks: str) -> bool:
    """Whether these texts are shown, one behind the other."""
    shown, at = _shown(render, messages), 0
    for mark in marks:
        at = shown.find(mark, at)
        if at < 0:
            return False
    return True


def _needs_null(render: Render, calling: Message) -> bool:
    empty, null = (_shown(render, [_USER, {**calling, "content": content}]) for content in ("", None))
    return "mark0" in null and "mark0" not in empty


def _with_text_arguments(message: Message) -> Message:
    return {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}


def _as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def _joined(first: Message, second: Message) -> Message:
    texts = [text for text in (first.get("content"), second.get("content")) if text]
    return {**first, "content": "\n\n".join(texts)}
