"""gpt-oss: a reply is several messages, each with a channel, and a recipient where it is a call.

Known from OpenAI's description of the harmony format. Their library, openai-harmony, does not fit here: it fetches its
own vocabulary from the network, and reads ids, not text.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from rollyard.gateway.tokens.parsers.arguments import is_object
from rollyard.gateway.tokens.parsers.parser import ToolCall
from rollyard.gateway.tokens.parsers.reading import FamilyParser, Reading

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS: Final = (_END, _CALL, _RETURN, _START)
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_IN_CHANNEL: Final = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


class HarmonyParser(FamilyParser):
    """`<|channel|>analysis` is reasoning, `to=functions.f` a call, everything else content."""

    specials: ClassVar[frozenset[str]] = frozenset({_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN})

    def read(self) -> Reading[None]:
        """Messages. The prompt ends behind `<|start|>assistant`, so that the first one has lost its start."""
        self._thought = self._said = False
        if self.reasoning_open:
            mark = yield from self._body("", "analysis", "")
        else:
            mark = yield from self.source.opening((_CHANNEL, "to=", _MESSAGE, _START))
        while True:
            if mark and mark not in (_END, _CALL, _RETURN):
                mark = yield from self._message(mark)
            else:
                mark = yield from self.source.until((_START, _CHANNEL), self.draft.say)
                if not mark:
                    return

    def _message(self, start: str) -> Reading[str]:
        """One message, of which `start` was read. Returns the mark that ended it."""
        if start.endswith(_MESSAGE):
            return (yield from self._body(start, "final", ""))
        header, mark = yield from self.source.take((_MESSAGE, *_ENDS))
        raw = start + header
        if mark != _MESSAGE:
            self.draft.say(raw + ("" if mark == _START else mark))
            return mark
        channel, recipient = _IN_CHANNEL.search(raw), _RECIPIENT.search(raw)
        return (
            yield from self._body(raw + mark, channel[1] if channel else "final", recipient[1] if recipient else "")
        )

    def _body(self, header: str, channel: str, recipient: str) -> Reading[str]:
        if recipient and recipient != "assistant":
            body, mark = yield from self.source.take(_ENDS)
            if self.tools and (mark or is_object(body)):
                self.draft.call(ToolCall(recipient.removeprefix("functions."), body.strip()))
            else:
                self.draft.say(header + body + ("" if mark == _START else mark))
            return mark
        if channel == "analysis":
            self.draft.think("\n" if self._thought else "")
            self._thought = True
            return (yield from self.source.until(_ENDS, self.draft.think))
        self.draft.say("\n" if self._said else "")
        self._said = True
        return (yield from self.source.until(_ENDS, self.draft.say))
