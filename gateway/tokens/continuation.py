"""What a template writes behind a reply whose ids are known.

The reply is rendered as one private character, once as the last message and once with what follows: up to where the
two agree, the text behind that character ends the reply's turn; from there on it is new.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rollyard.gateway.tokens.outline import (
    free_characters,
    map_words,
    outline,
    reply_outline,
    tools_outline,
    unescaped,
    words,
)
from rollyard.gateway.tokens.template import ChatTemplate, plain_messages
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import TokenIds

# Ends of a turn that are sampled where templates write another one into the history.
_STANDS_FOR: Final = {"<|return|>": "<|end|>", "<|eom_id|>": "<|eot_id|>"}
# Templates drop these from older turns.
_REASONING: Final = re.compile(r"</?(?:\w+:)?think>")


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply within its conversation; `new` is plain, see template.plain_messages."""

    history: list[Message]
    reply: Message
    new: list[Message]
    tools: list[Message] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text behind the place of a reply. Its first `old` characters end the reply's turn.

    `in_call`: the place is within a tool call, which the text closes. `escape` breaks up specials in untrusted words.
    """

    text: str
    old: int
    in_call: bool
    escape: str = field(compare=False)

    def unsampled(self, tokenizer: TextTokenizer, sampled: TokenIds) -> str:
        """The part of the text that is not in the sampled ids: these hold the end of the turn, or were cut."""
        ends = [found for found in tokenizer.find_specials(self.text[: self.old]) if found[2] in tokenizer.eos_ids]
        start = self.old if self.in_call else 0
        if ends:
            begin, end, number = ends[0]
            start = begin if self.in_call else 0
        else:
            _, end, number = tokenizer.leading_special(self.text, start) or (start, start, -1)
        ended = len(sampled) > 0 and number in _meanings(tokenizer, sampled[-1])
        return self.text[end if ended else start :]


def continuation(tokenizer: TextTokenizer, template: ChatTemplate, turn: Turn) -> Continuation | None:
    """What is behind the reply; None when the template writes the past differently once there is more."""
    bare = [outline(message, "") for message in turn.history]
    given = [reply_outline(turn.reply, "", ""), turn.new, dict(turn.options or {})]
    marks = free_characters(words([bare, given]), 4)
    past, tools = [outline(message, marks[0]) for message in turn.history], tools_outline(turn.tools, marks[0])
    found = _rendered(tokenizer, template, Turn(past, turn.reply, turn.new, tools, turn.options), marks)
    if found is None or marks[0] not in found.text:
        return found
    # The template repeats words of the past behind the reply: only the words themselves will do.
    past = plain_messages(turn.history)
    marks = free_characters(words([past, given, turn.tools or []]), 4)
    return _rendered(tokenizer, template, Turn(past, turn.reply, turn.new, turn.tools, turn.options), marks)


def _rendered(tokenizer: TextTokenizer, template: ChatTemplate, turn: Turn, marks: list[str]) -> Continuation | None:
    _, escape, said, argument = marks
    reply = reply_outline(turn.reply, said, argument)
    past, answer, new, tools, options = map_words(
        [turn.history, reply, turn.new, turn.tools, dict(turn.options or {})],
        lambda text: tokenizer.break_specials(text, escape),
    )

    def render(messages: list[Message], prompt: bool) -> str:
        return unescaped(template.render(messages, tools, prompt, options), marks)

    try:
        closed, text = render([*past, answer], False), render([*past, answer, *new], True)
        if text.count(said) > 1 or text.count(argument) > len(reply.get("tool_calls", ())):
            return None
        places = [place for mark in (said, argument) for place in (text.find(mark), text.rfind(mark)) if place >= 0]
        # A prompt may add what the history leaves out: then the past without a prompt is there.
        if not places or not any(_begins(text[: min(places)], render(past, prompt)) for prompt in (True, False)):
            return None
    except ModelError:
        return None
    place = max(places)
    tail, end = text[place + 1 :], closed[closed.rfind(text[place]) + 1 :]
    return Continuation(tail, _shared(tokenizer, tail, end), text[place] == argument, escape)


def _begins(text: str, past: str) -> bool:
    """Whether a text begins with the past. Blanks and marks of reasoning do not count: what was sent stands."""
    return _bare(text).startswith(_bare(past))


def _bare(text: str) -> str:
    return "".join(_REASONING.sub("", text).split())


def _shared(tokenizer: TextTokenizer, tail: str, end: str) -> int:
    """How many characters two texts begin with in common, no special token taken apart."""
    size = min(len(tail), len(end))
    size = next((at for at in range(size) if tail[at] != end[at]), size)
    cut = (start for start, stop, _ in tokenizer.find_specials(tail) if start < size < stop)
    return next(cut, size)


def _meanings(tokenizer: TextTokenizer, number: int) -> set[int]:
    """The specials that a sampled id stands for."""
    specials = tokenizer.specials
    other = next((meant for name, meant in _STANDS_FOR.items() if specials.get(name) == number), "")
    return {number, specials.get(other, number)}
