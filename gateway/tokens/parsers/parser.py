"""What a reply's text means to the gateway: content, reasoning and tool calls. One file for each family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is the JSON text of an object, or, where it is none, the words as
    written.

    `id` is the model's own, where the family has ids.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What some text has added: in this order reasoning, content, whole tool calls."""

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyParser(Protocol):
    """Reads one reply as it comes. Pushed in any portions, the joined pieces are the same."""

    specials: ClassVar[frozenset[str]]
    """Special tokens that it wants to see in the text; the others are left out."""

    def push(self, text: str) -> Piece:
        """More text. What may turn out to be the start of a mark is held back."""
        ...

    def end(self) -> Piece:
        """The reply is over, perhaps cut short: what is held back. A call that is not whole is content, as written."""
        ...
