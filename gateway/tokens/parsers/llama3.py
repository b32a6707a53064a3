"""Llama 3.1 and later: a reply that is JSON with name and parameters is a call; so is what follows <|python_tag|>.

Known from the models' chat templates and Meta's description of the prompt format. Several calls are divided by
semicolons.
"""

from __future__ import annotations

from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import json_call, members, sequence
from rollyard.gateway.tokens.parsers.parser import ToolCall
from rollyard.gateway.tokens.parsers.reading import FamilyParser, Reading

_TAG: Final = "<|python_tag|>"
_KEYS: Final = ('"name"', '"parameters"', '"arguments"', '"type"', '"function"')


class Llama3Parser(FamilyParser):
    """`{"name": "f", "parameters": {...}}`, from the start of the reply or behind the tag."""

    specials: ClassVar[frozenset[str]] = frozenset({_TAG})

    def read(self) -> Reading[None]:
        """Content, and behind it calls. JSON at the start could be a call as long as its first key allows it."""
        raw = ""
        if self.tools:
            raw = yield from self.source.opening(("{", _TAG))
            if raw.endswith("{"):
                key = yield from self.source.opening(_KEYS)
                if key:
                    raw += key
                else:
                    self.draft.say(raw)
                    raw = ""
        while True:
            tag = ""
            if raw:
                rest, tag = yield from self.source.take((_TAG,))
                self._calls(raw + rest)
            raw = tag or (yield from self.source.until((_TAG,) if self.tools else (), self.draft.say))
            if not raw:
                return

    def _calls(self, raw: str) -> None:
        calls = [_call_of(one) for one in sequence(raw.strip().removeprefix(_TAG), ";,") or ()]
        whole = [call for call in calls if call is not None]
        if not whole or len(whole) != len(calls):
            self.draft.say(raw)
            return
        for call in whole:
            self.draft.call(call)


def _call_of(text: str) -> ToolCall | None:
    """A name alone is no call: the model may have been asked for JSON."""
    return json_call(text) if {"parameters", "arguments"} & (members(text) or {}).keys() else None
