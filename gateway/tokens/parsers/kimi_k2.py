"""Kimi K2: calls between special tokens, each with an id that holds its name. The thinking model uses <think>.

Known from the model's guide to tool calls: ids are `functions.<name>:<index>`, the index counts through the session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import is_object
from rollyard.gateway.tokens.parsers.marked import CLOSE, OPEN, MarkedParser
from rollyard.gateway.tokens.parsers.parser import ToolCall

_BEGIN, _END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_SECTIONS: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_INDEX: Final = re.compile(r":\d+$")


class KimiK2Parser(MarkedParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in one section."""

    specials: ClassVar[frozenset[str]] = frozenset({OPEN, CLOSE, _BEGIN, _END, _ARGUMENTS, *_SECTIONS})
    calls: ClassVar[Mapping[str, str]] = {_BEGIN: _END}
    sections: ClassVar[tuple[str, ...]] = _SECTIONS
    ends_reasoning: ClassVar[tuple[str, ...]] = _SECTIONS[:1]

    def call_of(self, raw: str, closed: bool) -> ToolCall | None:
        """The id names the function."""
        number, mark, arguments = raw.removeprefix(_BEGIN).removesuffix(_END if closed else "").partition(_ARGUMENTS)
        number, arguments = number.strip(), arguments.strip()
        name = _INDEX.sub("", number).removeprefix("functions.")
        if not mark or not name or not (closed or is_object(arguments)):
            return None
        return ToolCall(name, arguments, number)
