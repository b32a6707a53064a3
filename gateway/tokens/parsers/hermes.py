"""Hermes and Qwen 2.5 and 3: each call is JSON between <tool_call> marks, reasoning stands in <think>.

Known from the models' chat templates, which show the format to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollyard.gateway.tokens.parsers.arguments import json_call
from rollyard.gateway.tokens.parsers.marked import CLOSE, OPEN, MarkedParser
from rollyard.gateway.tokens.parsers.parser import ToolCall


class HermesParser(MarkedParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

    specials: ClassVar[frozenset[str]] = frozenset({OPEN, CLOSE, "<tool_call>", "</tool_call>"})
    calls: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}

    def call_of(self, raw: str, closed: bool) -> ToolCall | None:
        """JSON that is whole is a call, closed or not."""
        return json_call(raw.removeprefix("<tool_call>").removesuffix("</tool_call>" if closed else ""))
