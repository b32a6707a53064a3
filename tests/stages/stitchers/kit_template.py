"""A chat template and a tokenizer in a few lines: ChatML's shape, a word an id. Deterministic, so that a test can say
what a model server would have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

Message = dict[str, Any]

END_OF_TURN: Final = 1
NEWLINE: Final = 2
THINK: Final = 3
THOUGHT: Final = 4
CALL: Final = 5
CALLED: Final = 6
TOOLS: Final = 7
ROLES: Final = {"system": 10, "developer": 11, "user": 12, "assistant": 13, "tool": 14}
_FIRST_COUNT: Final = 100
_FIRST_WORD: Final = 1000
_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")
VOCABULARY: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model says: `calls` are names and arguments as it wrote them."""

    text: str = ""
    thinks: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How messages become ids.

    `drops_reasoning`: replies before the last user message lose theirs. `shows_tools`: the definitions stand in the
    prompt. `splits`: the model samples words in two halves, where the tokenizer has one id. `counts`: the prompt begins
    with the number of its messages, so that none continues another one.
    """

    drops_reasoning: bool = False
    shows_tools: bool = True
    splits: bool = False
    counts: bool = False

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> list[int]:
        """The ids of a conversation that a reply is wanted to."""
        ids = [_FIRST_COUNT + len(messages)] if self.counts else []
        if tools and self.shows_tools:
            ids += [TOOLS, *words(json.dumps(list(tools), sort_keys=True)), NEWLINE]
        last_user = max((at for at, each in enumerate(messages) if each["role"] == "user"), default=-1)
        for at, message in enumerate(messages):
            ids += self._message(message, thinks=not self.drops_reasoning or at > last_user)
        return [*ids, ROLES["assistant"]]

    def suffix(self, new: Sequence[Message], sampled: Sequence[int]) -> list[int] | None:
        """What follows the sampled ids of a reply in the next prompt; None where the template rewrites what was."""
        if self.counts:
            return None
        ids = [NEWLINE] if sampled[-1:] == [END_OF_TURN] else [END_OF_TURN, NEWLINE]
        for message in new:
            ids += self._message(message, thinks=True)
        return [*ids, ROLES["assistant"]]

    def sampled(self, reply: Reply, *, ended: bool = True) -> list[int]:
        """The ids that the model samples for a reply; `ended`: it came to its end."""
        ids = [THINK, *self._chosen(reply.thinks), THOUGHT] if reply.thinks else []
        ids += self._chosen(reply.text)
        for name, arguments in reply.calls:
            ids += [CALL, *words(name), *self._chosen(arguments), CALLED]
        return [*ids, END_OF_TURN] if ended else ids

    def _chosen(self, text: str) -> list[int]:
        if not self.splits:
            return words(text)
        halves = (half for word in _WORD.findall(text) for half in (word[:1], word[1:]) if half)
        return [_id(half) for half in halves]

    def _message(self, message: Message, *, thinks: bool) -> list[int]:
        ids = [ROLES[message["role"]]]
        if thinks and (reasoning := message.get("reasoning_content")):
            ids += [THINK, *words(reasoning), THOUGHT]
        ids += words(text_of(message.get("content")))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            ids += [CALL, *words(function["name"]), *words(function["arguments"]), CALLED]
        return [*ids, END_OF_TURN, NEWLINE]


def words(text: str) -> list[int]:
    """The ids of a text: one for each word, sign or white space."""
    return [_id(word) for word in _WORD.findall(text)]


def text_of(content: Any) -> str:
    """Content as a template shows it: the texts of its parts, and images by reference."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else json.dumps(part) for part in content)


def _id(word: str) -> int:
    return _FIRST_WORD + crc32(word.encode()) % (VOCABULARY - _FIRST_WORD)
