"""Mistral: calls behind [TOOL_CALLS], reasoning in [THINK].

Known from mistral-common and the models' chat templates. Up to tokenizer v7 one JSON list holds all calls; from v11 on
each call is `[TOOL_CALLS]name[ARGS]{...}`, at times with `[CALL_ID]id` behind the name. Early reasoning models write
<think>.
"""

from __future__ import annotations

from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import is_object, items, json_call
from rollyard.gateway.tokens.parsers.parser import ToolCall
from rollyard.gateway.tokens.parsers.reading import FamilyParser, Reading

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_REASONING: Final = {"[THINK]": "[/THINK]", "<think>": "</think>"}


class MistralParser(FamilyParser):
    """Both forms."""

    specials: ClassVar[frozenset[str]] = frozenset({_CALLS, _ARGS, _ID, *_REASONING, *_REASONING.values()})

    def read(self) -> Reading[None]:
        """Reasoning, content, and calls to the end."""
        marks = (_CALLS,) if self.tools else ()
        opening = (yield from self.source.opening(tuple(_REASONING))).strip()
        mark = ""
        if opening or self.reasoning_open:
            closing = (_REASONING[opening],) if opening else tuple(_REASONING.values())
            self.draft.think("")
            mark = yield from self.source.until((*closing, *marks), self.draft.think)
        while True:
            if mark == _CALLS:
                body, mark = yield from self.source.take(marks)
                self._calls(body, closed=bool(mark))
            else:
                mark = yield from self.source.until(marks, self.draft.say)
            if not mark:
                return

    def _calls(self, body: str, closed: bool) -> None:
        calls = _calls_of(body.strip(), closed)
        if not calls:
            self.draft.say(_CALLS + body)
        for call in calls:
            self.draft.call(call)


def _calls_of(body: str, closed: bool) -> list[ToolCall]:
    """All calls of one mark; none when they are not whole. Not `closed`: the reply ends here."""
    if body.startswith(("[", "{")):
        calls = [json_call(one) for one in (items(body) or () if body.startswith("[") else (body,))]
        return [] if None in calls else [call for call in calls if call is not None]
    head, mark, arguments = body.partition(_ARGS)
    if not mark:  # its special token may be missing
        head, arguments = body[: body.find("{")], body[body.find("{") :]
    name, _, number = head.partition(_ID)
    name, arguments = name.strip(), arguments.strip()
    if not name or len(name.split()) > 1 or not (closed or is_object(arguments)):
        return []
    return [ToolCall(name, arguments, number.strip())]
