"""Qwen3-Coder and later Qwen models: calls in a kind of XML, arguments as plain text.

Known from the models' chat templates and from the parser that is published with the model. It strips one newline at
either end of an argument, and takes a function without <tool_call> around it, which the model writes at times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import typed
from rollyard.gateway.tokens.parsers.marked import CLOSE, OPEN, MarkedParser
from rollyard.gateway.tokens.parsers.parser import ToolCall

_CALL: Final = re.compile(r"(?:<tool_call>)?\s*<function=([^>\n]+)>(.*)</function>\s*(?:</tool_call>)?", re.DOTALL)
# An argument may hold the closing mark as text: it ends where another one or nothing follows.
_ARGUMENT: Final = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=[^>\n]+>|\Z)", re.DOTALL
)


class Qwen3CoderParser(MarkedParser):
    """`<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`."""

    specials: ClassVar[frozenset[str]] = frozenset({OPEN, CLOSE, "<tool_call>", "</tool_call>"})
    calls: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>", "<function=": "</function>"}

    def call_of(self, raw: str, closed: bool) -> ToolCall | None:
        """A function that is whole is a call, whether what is around it is closed or not."""
        match = _CALL.fullmatch(raw)
        if match is None:
            return None
        name, body = match[1].strip(), match[2]
        arguments = list(_ARGUMENT.finditer(body))
        if not name or "".join(one[0] for one in arguments).strip() != body.strip():
            return None
        return ToolCall(name, typed(name, [(one[1].strip(), one[2]) for one in arguments], self.tools))
