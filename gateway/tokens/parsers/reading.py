"""What the readers of all families share: text that is read up to marks, and the reply that grows from it.

A family describes how a reply is read as a generator, from the first character to the last; where the text that has
come does not suffice, it waits. So pushing the text in any portions gives the same reply.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import ClassVar, TypeVar

from rollyard.gateway.tokens.parsers.parser import Piece, ToolCall
from rollyard.schemas.call import Message

T = TypeVar("T")
Reading = Generator[None, None, T]
_BLANKS = " \t\r\n"


@lru_cache(maxsize=256)
def _compiled(marks: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """A pattern that finds any mark, every text that could become a mark, and how long such a text can be."""
    pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
    starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
    return pattern, starts, max(map(len, starts), default=0)


class Source:
    """Text that comes in portions. Its generators wait for more of it. No mark may be the start of another one."""

    def __init__(self) -> None:
        self._text = ""
        self._over = False

    def feed(self, text: str) -> None:
        """More text has come."""
        self._text += text

    def close(self) -> None:
        """No more text will come."""
        self._over = True

    def rest(self) -> str:
        """What nobody has read."""
        rest, self._text = self._text, ""
        return rest

    def until(self, marks: tuple[str, ...], sink: Callable[[str], None]) -> Reading[str]:
        """Pass text on to `sink`, up to the first of these marks. Returns the mark; "" at the end of the text."""
        pattern, starts, longest = _compiled(marks)
        while True:
            match = pattern.search(self._text)
            if match is not None:
                before, self._text = self._text[: match.start()], self._text[match.end() :]
                sink(before)
                return match[0]
            held = 0
            if not self._over:
                sizes = range(min(longest, len(self._text)), 0, -1)
                held = next((size for size in sizes if self._text[-size:] in starts), 0)
            certain = len(self._text) - held
            before, self._text = self._text[:certain], self._text[certain:]
            sink(before)
            if self._over:
                return ""
            yield

    def take(self, marks: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """The text up to the first of these marks, and the mark; "" for it at the end of the text."""
        parts: list[str] = []
        mark = yield from self.until(marks, parts.append)
        return "".join(parts), mark

    def opening(self, marks: tuple[str, ...]) -> Reading[str]:
        """Read one of these marks, where one stands next, blanks aside. Returns blanks and mark; else "", none read."""
        while True:
            bare = self._text.lstrip(_BLANKS)
            for mark in marks:
                if bare.startswith(mark):
                    size = len(self._text) - len(bare) + len(mark)
                    opening, self._text = self._text[:size], self._text[size:]
                    return opening
            if self._over or not any(mark.startswith(bare) for mark in marks):
                return ""
            yield


class _Text:
    """One kind of text. Newlines at its end wait until it is known whether they are part of it or of the layout."""

    def __init__(self) -> None:
        self.begun = False
        self.trims_start = False
        self._ready: list[str] = []
        self._waiting = ""

    def add(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            whole = self._waiting + body
            self._ready.append(whole.lstrip("\n") if self.trims_start and not self.begun else whole)
            self.begun = True
            self._waiting = ""
        self._waiting += text[len(body) :]

    def wait(self, text: str) -> None:
        """Text that counts only if more follows, or nothing else."""
        self._waiting += text

    def drop(self) -> None:
        """What waits is layout."""
        self._waiting = ""

    def close(self, layout: bool) -> None:
        """Nothing follows. With `layout`, newlines that wait are layout."""
        last = self._waiting.rstrip("\n") if layout else self._waiting
        self._ready.append(last.lstrip("\n") if self.trims_start and not self.begun else last)
        self._waiting = ""

    def take(self) -> str:
        ready, self._ready = "".join(self._ready), []
        return ready


class Draft:
    """A reply that grows. Newlines around reasoning and calls are layout, and left out; all others are content."""

    def __init__(self) -> None:
        self.called = False
        self._reasoning = _Text()
        self._content = _Text()
        self._calls: list[ToolCall] = []

    def think(self, text: str) -> None:
        """More reasoning; with "", there is reasoning, if only an empty one."""
        self._reasoning.trims_start = self._content.trims_start = True
        self._reasoning.add(text)

    def say(self, text: str) -> None:
        """More content."""
        self._content.add(text)

    def layout(self, mark: str) -> None:
        """A mark around calls: content, unless a call follows."""
        self._content.wait(mark)

    def call(self, call: ToolCall) -> None:
        """A whole call."""
        self.called = self._content.trims_start = True
        self._content.drop()
        self._calls.append(call)

    def close(self) -> None:
        """The reply is over."""
        self._reasoning.close(layout=True)
        self._content.close(layout=self.called)

    def take(self) -> Piece:
        """What was added since the last time."""
        calls, self._calls = tuple(self._calls), []
        return Piece(self._reasoning.take(), self._content.take(), calls)


class FamilyParser(ABC):
    """Base of the readers of all families.

    Without `tools` calls stay content, as they were written. `reasoning_open`: the prompt ends within reasoning.
    """

    specials: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, tools: Sequence[Message] | None = None, *, reasoning_open: bool = False) -> None:
        self.tools = list(tools or ())
        self.reasoning_open = reasoning_open
        self.source = Source()
        self.draft = Draft()
        self._reading = self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the whole reply from `source` into `draft`."""

    def push(self, text: str) -> Piece:
        """More text."""
        self.source.feed(text)
        next(self._reading, None)
        return self.draft.take()

    def end(self) -> Piece:
        """The reply is over."""
        self.source.close()
        next(self._reading, None)
        self.draft.say(self.source.rest())
        self.draft.close()
        return self.draft.take()
