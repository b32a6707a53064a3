"""Content blocks of Anthropic's API as messages in Chat form, so that nothing is lost.

What Chat has no place for stands in keys that begin with `_`. A model never sees these:

- `_block` of a text or image part: the block that the part tells of, where it was another one than plain text.
- `_blocks` of a message: its blocks in order, without what the Chat form holds, where they did not stand in the usual
  order, or had more to them. The usual order is one thinking block that the gateway signed, texts, tool calls; in a
  user message, tool results come before everything else.
- `_is_error` and `_block` of a tool message: what its tool_result said beside its content.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import blake2b
from typing import Any, Final

import msgspec

from rollyard.gateway.protocols.messages_fields import Block, bad, blocks, need
from rollyard.schemas.call import Message

UNPARSED: Final = "__unparsedToolInput"
_TEXT_KEYS: Final = frozenset({"type", "text"})
_IMAGE_KEYS: Final = frozenset({"type", "source"})
_THINKING_KEYS: Final = frozenset({"type", "thinking", "signature"})
_CALL_KEYS: Final = frozenset({"type", "id", "name", "input"})
_RESULT_KEYS: Final = frozenset({"type", "tool_use_id", "content", "is_error"})
_USUAL: Final = {"thinking": 0, "text": 1, "tool_use": 2}
_sorted: Final = msgspec.json.Encoder(order="sorted")


class Signature:
    """Signs a thinking block. It is a digest of the text, taken as the text comes; nobody is held to it."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=48, person=b"thinking")

    def update(self, text: str) -> None:
        """Some more text."""
        self._digest.update(text.encode())

    def value(self) -> str:
        """The signature of the text so far."""
        return b64encode(self._digest.digest()).decode()


def signature(text: str) -> str:
    """The signature of a thinking text."""
    whole = Signature()
    whole.update(text)
    return whole.value()


def chat_messages(message: Block, field: str) -> list[Message]:
    """A message of a request, which stands at `field`, in Chat form. Raises Refusal that names the field."""
    role = need(message, "role", str, field)
    if role not in ("user", "assistant", "system"):
        raise bad(f"{field}.role", f"{role!r} is no role; it must be user, assistant or system")
    if isinstance(message.get("content"), str):
        return [{"role": role, "content": message["content"]}]
    content, where = need(message, "content", list, field), f"{field}.content"
    if role == "assistant":
        return [_assistant(blocks(content, where), where)]
    if role == "user":
        return _user(blocks(content, where), where)
    return [{"role": "system", "content": text_or_parts(content, where)}]


def text_or_parts(content: list[Any], field: str) -> str | list[Block]:
    """Blocks as Chat content: one plain text as a string, else a list of parts."""
    return _content([_part(block, f"{field}[{index}]") for index, block in enumerate(blocks(content, field))])


def utf16_units(text: str) -> int:
    """The length of a text as JavaScript counts it."""
    return len(text.encode("utf-16-le")) // 2


def _content(parts: list[Block]) -> str | list[Block]:
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == _TEXT_KEYS:
        text: str = parts[0]["text"]
        return text
    return parts


def _user(content: list[Block], field: str) -> list[Message]:
    results: list[Message] = []
    parts: list[Block] = []
    order: list[Block] = []
    for index, block in enumerate(content):
        where = f"{field}[{index}]"
        if block["type"] == "tool_result":
            results.append(_tool(block, where))
            order.append({"type": "tool_result"})
        else:
            parts.append(_part(block, where))
            order.append({"type": "text"})
    if results and not parts:
        return results
    message: Message = {"role": "user", "content": _content(parts)}
    if {"type": "tool_result"} in order[len(results) :]:
        message["_blocks"] = order
    return [*results, message]


def _tool(block: Block, field: str) -> Message:
    content = block.get("content")
    message: Message = {"role": "tool", "tool_call_id": need(block, "tool_use_id", str, field), "content": ""}
    if isinstance(content, list):
        message["content"] = text_or_parts(content, f"{field}.content")
    elif content is not None:
        message["content"] = need(block, "content", str, field)
    if block.get("is_error"):
        message["_is_error"] = True
    if more := _more(block, _RESULT_KEYS):
        message["_block"] = more
    return message


def _assistant(content: list[Block], field: str) -> Message:
    reasoning: list[str] = []
    parts: list[Block] = []
    calls: list[Block] = []
    order: list[Block] = []
    for index, block in enumerate(content):
        where = f"{field}[{index}]"
        match block["type"]:
            case "thinking":
                text = need(block, "thinking", str, where)
                reasoning.append(text)
                order.append(_thinking_entry(block, text))
            case "redacted_thinking":
                order.append(block)
            case "tool_use":
                call, entry = _tool_call(block, where)
                calls.append(call)
                order.append(entry)
            case _:
                parts.append(_part(block, where))
                order.append({"type": "text"})
    message: Message = {"role": "assistant", "content": _content(parts) if parts or not calls else None}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if not _usual(order):
        message["_blocks"] = [
            {**entry, "chars": len(reasoning.pop(0))} if entry["type"] == "thinking" else entry for entry in order
        ]
    return message


def _thinking_entry(block: Block, text: str) -> Block:
    entry = {"type": "thinking", **_more(block, _THINKING_KEYS)}
    if block.get("signature") != signature(text):
        entry["signature"] = block.get("signature")
    return entry


def _usual(order: list[Block]) -> bool:
    """Whether the Chat form alone says which blocks there were."""
    if any(len(entry) > 1 or entry["type"] not in _USUAL for entry in order):
        return False
    ranks = [_USUAL[entry["type"]] for entry in order]
    return ranks == sorted(ranks) and ranks.count(_USUAL["thinking"]) <= 1


def _tool_call(block: Block, field: str) -> tuple[Block, Block]:
    """A call in Chat form, and its entry in `_blocks`."""
    entry = {"type": "tool_use", **_more(block, _CALL_KEYS)}
    if "input" not in block:
        raise bad(f"{field}.input", "it is missing")
    arguments, whole_length = _arguments(block["input"])
    if whole_length is not None:
        entry["arguments_length"] = whole_length
    function = {"name": need(block, "name", str, field), "arguments": arguments}
    return {"id": need(block, "id", str, field), "type": "function", "function": function}, entry


def _arguments(value: Any) -> tuple[str, int | None]:
    """The arguments as text. Where they were no JSON, as the model wrote them.

    Claude Code keeps the first 2,048 UTF-16 units of these only; then the second value is how many there were.
    """
    unparsed = value.get(UNPARSED) if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(unparsed, dict) and isinstance(raw := unparsed.get("raw"), str):
        length = unparsed.get("len")
        return raw, length if isinstance(length, int) and length != utf16_units(raw) else None
    return msgspec.json.encode(value).decode(), None


def _part(block: Block, field: str) -> Block:
    """Any block as a part that a model can be shown: text, or an image."""
    match block["type"]:
        case "text":
            text = need(block, "text", str, field)
            plain = {"type": "text", "text": text}
            return {**plain, "_block": block} if _more(block, _TEXT_KEYS) else plain
        case "image":
            url = _image_url(need(block, "source", dict, field), f"{field}.source")
            if url is not None:
                image = {"type": "image_url", "image_url": {"url": url}}
                return {**image, "_block": block} if _more(block, _IMAGE_KEYS) else image
        case "document":
            return {"type": "text", "text": _document(block, field), "_block": block}
    # In sorted order, since agents do not keep the order of keys.
    return {"type": "text", "text": _sorted.encode(block).decode(), "_block": block}


def _image_url(source: Block, field: str) -> str | None:
    match need(source, "type", str, field):
        case "base64":
            return f"data:{need(source, 'media_type', str, field)};base64,{need(source, 'data', str, field)}"
        case "url":
            return need(source, "url", str, field)
    return None


def _document(block: Block, field: str) -> str:
    """The text of a document, or a line that says which one it is."""
    source = need(block, "source", dict, field)
    data, content = source.get("data"), source.get("content")
    where = f"{field}.source"
    if source.get("type") == "text":
        shown = need(source, "data", str, where)
    elif isinstance(content, str):
        shown = content
    elif isinstance(content, list):
        inner = blocks(content, f"{where}.content")
        shown = "\n".join(str(part.get("text", f"[{part['type']}]")) for part in inner)
    else:
        what = source.get("url") or source.get("file_id") or source.get("media_type") or source.get("type")
        # Another file of the same name is another prompt.
        mark = f", blake2b {blake2b(data.encode(), digest_size=8).hexdigest()}" if isinstance(data, str) else ""
        shown = f"[document: {what}{mark}; it cannot be shown as text]"
    head = [text for text in (block.get("title"), block.get("context")) if isinstance(text, str) and text]
    return "\n\n".join([*head, shown])


def _more(block: Block, known: frozenset[str]) -> Block:
    """What a block says beyond the known keys; null says nothing."""
    if block.keys() <= known:
        return {}
    return {key: value for key, value in block.items() if key not in known and value is not None}
