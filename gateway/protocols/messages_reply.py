"""A reply in the words of Anthropic's API: its blocks, its usage, why it stopped."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rollyard.gateway.exchange import Finished
from rollyard.gateway.protocols.messages_blocks import UNPARSED, signature, utf16_units
from rollyard.gateway.protocols.messages_fields import Block
from rollyard.schemas.call import Message, Usage

_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}


def message(call_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    """A message that has not begun yet."""
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def blocks_of(reply: Message) -> list[Block]:
    """The blocks of a reply. Blank texts are left out, as the vendor's API does: it refuses to get them back."""
    blocks: list[Block] = []
    reasoning, text = reply.get("reasoning_content") or "", reply.get("content") or ""
    if reasoning.strip():
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature(reasoning)})
    if text.strip():
        blocks.append({"type": "text", "text": text})
    for call in reply.get("tool_calls") or ():
        function = call["function"]
        given = tool_input(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def tool_input(arguments: str) -> Any:
    """Arguments as the object that they are, to the letter; in the form of Claude Code where they are none."""
    if not arguments:
        return {}
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(arguments.encode())
    except (msgspec.MsgspecError, RecursionError):
        pass
    return {UNPARSED: {"raw": arguments, "len": utf16_units(arguments)}}


def usage_of(usage: Usage, output_tokens: int) -> dict[str, Any]:
    """Token counts. Agents add the three kinds of input, and compact their history by the sum."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output_tokens,
    }


def stop_of(finished: Finished) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`."""
    reason = _STOP_REASONS.get(finished.finish_reason)
    if reason is None:
        if finished.reply.get("tool_calls"):
            reason = "tool_use"
        elif finished.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        else:
            reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
