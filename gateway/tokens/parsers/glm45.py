"""GLM 4.5 and later: the name, then keys and values between marks. Values are text, or JSON where they are no text.

Known from the models' chat templates. The model ends a call with <|observation|> and a reply with <|user|>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import typed
from rollyard.gateway.tokens.parsers.marked import CLOSE, OPEN, MarkedParser
from rollyard.gateway.tokens.parsers.parser import ToolCall

_ARGUMENT: Final = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
_MARKS: Final = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class Glm45Parser(MarkedParser):
    """`<tool_call>f<arg_key>x</arg_key><arg_value>value</arg_value></tool_call>`, with newlines between or without."""

    specials: ClassVar[frozenset[str]] = frozenset({OPEN, CLOSE, *_MARKS})
    calls: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}

    def call_of(self, raw: str, closed: bool) -> ToolCall | None:
        """Only a closed call is whole: each argument could be the last."""
        if not closed:
            return None
        body = raw.removeprefix("<tool_call>").removesuffix("</tool_call>")
        head, mark, _ = body.partition("<arg_key>")
        arguments = list(_ARGUMENT.finditer(body, len(head) if mark else len(body)))
        name = head.strip()
        if not name or "\n" in name or "".join(one[0] for one in arguments).strip() != body[len(head) :].strip():
            return None
        return ToolCall(name, typed(name, [(one[1].strip(), one[2]) for one in arguments], self.tools))
