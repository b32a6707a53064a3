"""ChatML with tools and tool calls in the style of Hermes, for tokenizers whose own template knows no tools."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.call import Message
from rollyard.schemas.packed import TokenIds

TEMPLATE = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- 'Functions that may be called:\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- 'A call is written as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools and loop.first %}{% continue %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- set thought = message.reasoning_content or message.reasoning %}
{%- if thought %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\n' if message.content or not loop.first }}
{{- '<tool_call>\n' + {"name": call.function.name, "arguments": call.function.arguments} | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_START, _END = "<|im_start|>", "<|im_end|>"
_OPEN = "assistant\n"


class ReplyText(NamedTuple):
    """What a model samples, and where in it reasoning and content are, as (start, end)."""

    text: str
    reasoning: tuple[int, int]
    content: tuple[int, int]


def reply_text(content: str, calls: list[tuple[str, dict[str, Any]]], reasoning: str = "") -> ReplyText:
    """What a model samples for a reply; the template above writes the same in the history."""
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    texts = [content] if content else []
    for name, arguments in calls:
        texts.append(
            "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
        )
    at = len("<think>\n") if reasoning else 0
    return ReplyText(thought + "\n".join(texts), (at, at + len(reasoning)), (len(thought), len(thought) + len(content)))


def transcript(ids: TokenIds, tokenizer: TextTokenizer) -> tuple[list[Message], int]:
    """The messages that the ids of a prompt hold, and where the reply begins that is to be sampled, or gone on with.

    A prompt without ChatML's marks is one message of a user.
    """
    start, end = tokenizer.specials.get(_START), tokenizer.specials.get(_END)
    numbers = ids.tolist()
    starts = [position for position, number in enumerate(numbers) if number == start]
    if not starts:
        return [{"role": "user", "content": tokenizer.decode(ids, True)}], len(ids)
    messages: list[Message] = []
    for position, following in zip(starts, [*starts[1:], len(numbers)], strict=True):
        turn = numbers[position + 1 : following]
        text = tokenizer.decode(TokenIds.of(turn[: turn.index(end)] if end in turn else turn), True)
        if following == len(numbers) and end not in turn and text.startswith(_OPEN):
            return messages, position + 1 + _ids_of(_OPEN, turn, tokenizer)
        role, _, content = text.partition("\n")
        messages.append({"role": role, "content": content})
    return messages, len(ids)


def _ids_of(text: str, ids: list[int], tokenizer: TextTokenizer) -> int:
    """How many of the ids make up the text that they begin with."""
    wanted = len(text.encode())
    for count, number in enumerate(ids, 1):
        wanted -= len(tokenizer.token_bytes(number))
        if wanted <= 0:
            return count
    return len(ids)
