"""Prompts as token ids: the first from the template, each later one as the last one continued.

What a model sampled is never turned into text and back. The template is only asked for the text behind the sampled
reply: the reply is rendered as one private character, and what follows that character is new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rollyard.gateway.tokens.template import ChatTemplate, plain_messages
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import TokenIds

# Unicode reserves these for use inside a program; text that is exchanged does not hold them.
_PRIVATE = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class Renderer:
    """A tokenizer and a chat template of one model."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def prompt(
        self, messages: list[Message], tools: list[Message] | None, options: Mapping[str, Any] | None = None
    ) -> TokenIds:
        """Ids of the whole conversation and the generation prompt. Raises ModelError when it cannot be rendered."""
        plain = plain_messages(messages)
        escape, _ = _private_characters(plain, tools)
        text = self.template.render(self._escaped(plain, escape), self._escaped(tools, escape), True, options)
        return self.tokenizer.encode_rendered(text, escape)

    def suffix(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        answered: int,
        sampled: TokenIds,
        options: Mapping[str, Any] | None = None,
    ) -> TokenIds | None:
        """Ids that follow `sampled` in the next prompt; `messages[:answered]` end with the reply that was sampled.

        Next prompt = the last prompt + sampled + suffix. None when the template writes earlier messages differently
        once there are later ones, so that a prompt cannot be continued; then the caller starts a new prompt.
        """
        history = [_outline(message) for message in plain_messages(messages[: answered - 1])]
        plain = plain_messages(messages[answered:])
        escape, reply = _private_characters([*history, *plain], tools)
        new, declared = self._escaped(plain, escape), self._escaped(tools, escape)
        try:
            before = self.template.render(history, declared, True, options)
            answer = {"role": "assistant", "content": reply}
            text = self.template.render([*history, answer, *new], declared, True, options)
        except ModelError:
            return None
        head, found, tail = text.partition(reply)
        if not found or reply in tail or not head.startswith(before):
            return None
        end_of_turn = self.tokenizer.leading_special(tail)
        if end_of_turn and len(sampled) and sampled[-1] == end_of_turn[0]:
            tail = end_of_turn[1]
        return self.tokenizer.encode_rendered(tail, escape)

    def _escaped(self, value: Any, escape: str) -> Any:
        return _map_strings(value, lambda text: self.tokenizer.break_specials(text, escape))


def _outline(message: Message) -> Message:
    """An earlier message for the render around a reply: its ids stand, so what was said does not matter.

    Without this, a template that drops old reasoning would seem to write the past differently.
    """
    if message.get("role") != "assistant":
        return message
    outline: Message = {"role": "assistant", "content": "-"}
    return {**outline, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else outline


def _private_characters(messages: list[Message], tools: list[Message] | None) -> tuple[str, str]:
    """Two characters that stand nowhere in the conversation."""
    everything = json.dumps([messages, tools], ensure_ascii=False)
    free = [character for character in _PRIVATE if character not in everything]
    if len(free) < 2:
        raise ModelError(
            "the messages use up the characters that Unicode reserves for private use (U+FDD0 to U+FDEF)",
            hint="remove them from the messages",
            status=400,
        )
    return free[0], free[1]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value
