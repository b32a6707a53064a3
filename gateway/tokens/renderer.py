"""Prompts as token ids: the first from the template, each later one as the last one continued.

What a model sampled is never turned into text and back: the template is only asked for the text behind the reply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from rollyard.gateway.tokens.continuation import Turn, continuation
from rollyard.gateway.tokens.outline import end_of, free_characters, map_words, tools_outline, unescaped, words
from rollyard.gateway.tokens.template import ChatTemplate, plain_messages
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.call import Message
from rollyard.schemas.packed import TokenIds


class Renderer:
    """A tokenizer and a chat template of one model."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._looks_at_end = lru_cache(maxsize=64)(self._try_ends)

    def prompt(
        self, messages: list[Message], tools: list[Message] | None, options: Mapping[str, Any] | None = None
    ) -> TokenIds:
        """Ids of the whole conversation and the generation prompt. Raises ModelError when it cannot be rendered."""
        plain = plain_messages(messages)
        given = dict(options or {})
        (escape,) = free_characters(words([plain, tools or [], given]), 1)
        safe, declared, variables = map_words(
            [plain, tools, given], lambda text: self.tokenizer.break_specials(text, escape)
        )
        text = self.template.render(safe, declared, True, variables)
        return self.tokenizer.encode_rendered(unescaped(text, [escape]), escape)

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

        Reasoning of earlier turns stays, whatever the template does with it. The end of a turn that was not sampled is
        added.
        """
        history, reply, new = messages[: answered - 1], messages[answered - 1], plain_messages(messages[answered:])
        found = None
        if self.looks_at_end_only(bool(tools), options):
            turn = Turn(end_of(history), reply, new, tools, options)
            found = continuation(self.tokenizer, self.template, turn)
        if found is None:
            turn = Turn(history, reply, new, tools, options)
            found = continuation(self.tokenizer, self.template, turn)
        if found is None:
            return None
        text = found.unsampled(self.tokenizer, sampled)
        return self.tokenizer.encode_rendered(text, found.escape, continues=True)

    def looks_at_end_only(self, tools: bool, options: Mapping[str, Any] | None = None) -> bool:
        """Whether what the template writes behind a reply depends on the last few messages only; found by trying."""
        return self._looks_at_end(tools, json.dumps(options or {}, sort_keys=True, default=str))

    def _try_ends(self, tools: bool, options: str) -> bool:
        return all(self._same_at_end(turn) for turn in _trials(tools, json.loads(options)))

    def _same_at_end(self, turn: Turn) -> bool:
        end = Turn(end_of(turn.history), turn.reply, turn.new, turn.tools, turn.options)
        return continuation(self.tokenizer, self.template, turn) == continuation(self.tokenizer, self.template, end)


def _trials(tools: bool, options: Mapping[str, Any] | None) -> Iterable[Turn]:
    """Conversations that are longer than what `end_of` leaves of them."""
    system: Message = {"role": "system", "content": "s"}
    user: Message = {"role": "user", "content": "q"}
    reply: Message = {"role": "assistant", "content": "a"}
    yield Turn([system, *([user, reply] * 5), user], reply, [user], None, options)
    if tools:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"q": "x"}}}
        asked: Message = {"role": "assistant", "content": "a", "tool_calls": [call]}
        result: Message = {"role": "tool", "content": "r", "tool_call_id": "call00001", "name": "f"}
        declared = tools_outline([call], "d")
        rounds = [asked, result] * 4
        yield Turn([system, user, *rounds], asked, [result], declared, options)
        yield Turn([system, user, *rounds], reply, [user], declared, options)
        yield Turn([system, *([user, *rounds, reply] * 2), user, asked, result], asked, [result], declared, options)
