"""A conversation without its words: what a template needs to see of the past, to write what comes after it.

The ids of the past stand, so what was said in it does not matter; its order, roles and calls do. Words are replaced by
one private character: where it shows up in what is new, the template has repeated the past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError

# Unicode reserves these for use inside a program; text that is exchanged does not hold them.
_PRIVATE: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Replies that are kept of the past where a template looks at its end only.
_KEPT_REPLIES: Final = 2


def outline(message: Message, filler: str) -> Message:
    """A message of the past. What a model says beside a call counts as reasoning in some templates: it stays out."""
    kept: Message = {key: value for key, value in message.items() if key in ("role", "name", "tool_call_id")}
    calls = _calls(message, {})
    return {**kept, **calls, "content": "" if calls else filler}


def reply_outline(message: Message, text: str, argument: str) -> Message:
    """The reply that was sampled, with `text` as its content and `argument` in each of its calls."""
    return {"role": "assistant", "content": text, **_calls(message, {"q": argument})}


def tools_outline(tools: list[Message] | None, filler: str) -> list[Message] | None:
    """One tool in place of all."""
    if not tools:
        return None
    parameters = {"type": "object", "properties": {"q": {"type": "string", "description": filler}}, "required": ["q"]}
    return [{"type": "function", "function": {"name": "f", "description": filler, "parameters": parameters}}]


def end_of(history: list[Message]) -> list[Message]:
    """The messages up to the first of the user, and the last replies with what follows each.

    So every message still follows one that it may follow.
    """
    first = next((at for at, message in enumerate(history) if message.get("role") == "user"), len(history)) + 1
    at, replies = len(history), 0
    while at > first and replies < _KEPT_REPLIES:
        at -= 1
        replies += history[at].get("role") == "assistant"
    return history if at <= first else history[:first] + history[at:]


def words(value: Any) -> Iterable[str]:
    """All strings in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from words(item)
    elif isinstance(value, list):
        for item in value:
            yield from words(item)


def map_words(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_words(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_words(item, change) for key, item in value.items()}
    return value


def free_characters(texts: Iterable[str], count: int) -> list[str]:
    """Private characters that stand in none of the texts, as such or escaped. Raises ModelError: there are too few."""
    everything = "".join(text for text in texts if not text.isascii() or "\\u" in text)
    lower = everything.lower()
    free = [character for character in _PRIVATE if character not in everything and _escape(character) not in lower]
    if len(free) < count:
        raise ModelError(
            "the messages use up the characters that Unicode reserves for private use (U+FDD0 to U+FDEF)",
            hint="remove them from the messages",
            status=400,
        )
    return free[:count]


def unescaped(text: str, characters: Iterable[str]) -> str:
    """The text with these characters as such, where a template has written them as JSON escapes."""
    if "\\ufd" in text:
        for character in characters:
            text = text.replace(_escape(character), character)
    return text


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _calls(message: Message, arguments: dict[str, Any]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return {}
    return {"tool_calls": [_call(call, arguments) for call in calls]}


def _call(call: Any, arguments: dict[str, Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {"name": function.get("name", ""), "arguments": arguments}}
