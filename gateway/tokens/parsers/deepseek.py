"""DeepSeek V3, R1 and V3.1: calls between special tokens, written with fullwidth bars. Reasoning stands in <think>.

Known from the models' chat templates. V3 and R1 write `function<sep>name` and the arguments as a fenced block of JSON,
V3.1 writes `name<sep>` and plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import is_object
from rollyard.gateway.tokens.parsers.marked import CLOSE, OPEN, MarkedParser
from rollyard.gateway.tokens.parsers.parser import ToolCall


def _special(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _END, _SEPARATOR = _special("tool call begin"), _special("tool call end"), _special("tool sep")
_SECTIONS: Final = (_special("tool calls begin"), _special("tool calls end"))


class DeepSeekParser(MarkedParser):
    """Both forms; a section holds all calls."""

    specials: ClassVar[frozenset[str]] = frozenset({OPEN, CLOSE, _BEGIN, _END, _SEPARATOR, *_SECTIONS})
    calls: ClassVar[Mapping[str, str]] = {_BEGIN: _END}
    sections: ClassVar[tuple[str, ...]] = _SECTIONS
    ends_reasoning: ClassVar[tuple[str, ...]] = _SECTIONS[:1]

    def call_of(self, raw: str, closed: bool) -> ToolCall | None:
        """The form is told by what stands behind the separator."""
        head, separator, tail = raw.removeprefix(_BEGIN).removesuffix(_END if closed else "").partition(_SEPARATOR)
        name, arguments = head.strip(), tail.strip()
        if name == "function" and not arguments.startswith("{"):
            name, _, arguments = arguments.partition("\n")
            name, arguments = name.strip(), _unfenced(arguments.strip())
        if not separator or not name or not (closed or is_object(arguments)):
            return None
        return ToolCall(name, arguments)


def _unfenced(text: str) -> str:
    if not text.startswith("```") or not text.endswith("```") or "\n" not in text:
        return text
    return text.partition("\n")[2].removesuffix("```").strip()
