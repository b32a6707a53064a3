"""Models without tool calls of their own: content, behind optional reasoning in <think>."""

from __future__ import annotations

from typing import ClassVar

from rollyard.gateway.tokens.parsers.marked import CLOSE, OPEN, MarkedParser


class PlainParser(MarkedParser):
    """Reasoning and content."""

    specials: ClassVar[frozenset[str]] = frozenset({OPEN, CLOSE})
