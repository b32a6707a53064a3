"""Replies that put each tool call between two marks, behind optional reasoning in <think>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollyard.gateway.tokens.parsers.parser import ToolCall
from rollyard.gateway.tokens.parsers.reading import FamilyParser, Reading

OPEN, CLOSE = "<think>", "</think>"


class MarkedParser(FamilyParser):
    """Base of the families whose calls have a beginning and an end.

    Only reasoning at the very start is reasoning: later on a model may well write about `<think>`.
    """

    calls: ClassVar[Mapping[str, str]] = {}
    """The mark before a call, and the one behind it."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Marks around all calls; they say nothing by themselves."""
    ends_reasoning: ClassVar[tuple[str, ...]] = ()
    """Marks that end reasoning that was not closed. Only special tokens: others may be what the model thinks about."""

    def call_of(self, raw: str, closed: bool) -> ToolCall | None:
        """The call that was written, marks included; None when it is none, or not whole. Not `closed`: cut short."""
        raise NotImplementedError

    def read(self) -> Reading[None]:
        """Reasoning, then content and calls."""
        marks = (*self.calls, *self.sections) if self.tools else ()
        mark = ""
        if self.reasoning_open or (yield from self.source.opening((OPEN,))):
            self.draft.think("")
            implicit = tuple(mark for mark in self.ends_reasoning if mark in marks)
            mark = yield from self.source.until((CLOSE, *implicit), self.draft.think)
        while True:
            if mark in self.calls:
                yield from self._read_call(mark)
            elif mark in self.sections and not self.draft.called:
                self.draft.layout(mark)
            mark = yield from self.source.until(marks, self.draft.say)
            if not mark:
                return

    def _read_call(self, mark: str) -> Reading[None]:
        body, end = yield from self.source.take((self.calls[mark],))
        raw = mark + body + end
        call = self.call_of(raw, bool(end))
        if call is None:
            self.draft.say(raw)
        else:
            self.draft.call(call)
