"""Lenient matching: which messages are the same though an agent has written them anew. Pure.

Lenience decides which call a request continues, and never changes a token. Each rule has a name, is counted by the
calls that it matched, and can be switched off by a sample policy.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from hashlib import blake2b
from typing import Any, Final

import msgspec

from rollyard.gateway.history import KNOWN_BY_CALL_IDS, RULES, Rule
from rollyard.schemas.call import Message

_json: Final = msgspec.json.Encoder(order="sorted")
_VOLATILE_LINE: Final = re.compile(
    r"^(x-anthropic-billing-header:.*|[ \t]*(today's date|(the )?current (date|time|datetime|date and time))\b.*)$\n?",
    re.I | re.M,
)
_OPENS, _CLOSES = "<system-reminder>", "</system-reminder>"
_MASK: Final = re.compile(r"\*{3,}")
_BETWEEN_WORDS: Final = re.compile(r'[\s"\\]')
_SYSTEM: Final = ("system", "developer")
UNPARSED: Final = "__unparsedToolInput"


def _each_text(message: Message, change: Any) -> Message:
    """The message with `change` made to its text, or to each of its text parts."""
    content = message.get("content")
    if isinstance(content, str):
        changed: Any = change(content)
        return message if changed == content else {**message, "content": changed}
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "text": change(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
        for part in content
    ]
    return message if parts == content else {**message, "content": parts}


def _drop_volatile_lines(message: Message) -> Message:
    if message.get("role") not in _SYSTEM:
        return message
    return _each_text(message, lambda text: _VOLATILE_LINE.sub("", text))


def _drop_trailing_space(message: Message) -> Message:
    return _each_text(message, str.rstrip)


def _drop_reminders(message: Message) -> Message:
    if message.get("role") != "tool":
        return message
    return _each_text(message, _without_reminders)


def _without_reminders(text: str) -> str:
    kept = text.rstrip()
    while kept.endswith(_CLOSES) and (start := kept.rfind(_OPENS)) >= 0:
        text = kept = kept[:start].rstrip()
    return text


def _restore_tool_input(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    restored = [_restored(call) for call in calls]
    return message if restored == calls else {**message, "tool_calls": restored}


def _restored(call: Any) -> Any:
    """What an agent wraps since it cannot be parsed is the text that the model wrote."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    wrapped = arguments.get(UNPARSED) if isinstance(arguments, dict) else None
    raw = wrapped.get("raw") if isinstance(wrapped, dict) else None
    return {**call, "function": {**function, "arguments": raw}} if isinstance(raw, str) else call


_NULLS: Final = "null_equals_absent"
CANONICAL: Final[dict[str, Rule]] = {
    **{name: rule for name, rule in RULES.items() if name != _NULLS},
    "volatile_system_lines": _drop_volatile_lines,
    "tool_result_reminders": _drop_reminders,
    "trailing_space": _drop_trailing_space,
    "malformed_tool_input": _restore_tool_input,
    _NULLS: RULES[_NULLS],
}
"""Rules that bring one message into a canonical form, in this order."""

FLOATING_USER_MESSAGE: Final = "floating_user_message"
"""The last user message of a request moves along: it stands behind the reply in the next one."""
MASKED_SECRETS: Final = "masked_secrets"
"""`***` stands for one word that was there."""
LAST_USER_EXTENDED: Final = "last_user_extended"
"""A repeated request adds words to its last user message."""

NAMES: Final = frozenset({*CANONICAL, KNOWN_BY_CALL_IDS, FLOATING_USER_MESSAGE, MASKED_SECRETS, LAST_USER_EXTENDED})
"""Every rule that can be switched off."""


class Matcher:
    """Compares messages under the rules that are switched on."""

    def __init__(self, off: Collection[str] = ()) -> None:
        self.off = frozenset(off)
        self._rules = {name: rule for name, rule in CANONICAL.items() if name not in self.off}
        self._digests: dict[int, tuple[Message, bytes]] = {}
        self._by_content: dict[bytes, bytes] = {}

    def digest(self, message: Message) -> bytes:
        """A digest of the canonical form. The message must not change afterwards."""
        known = self._digests.get(id(message))
        if known is None:
            # The message is kept with it, so that no other one gets its address. Agents repeat most of what they say.
            said = written(message)
            digest = self._by_content.get(said)
            if digest is None:
                digest = self._by_content[said] = _digest(self._form(message))
            known = self._digests[id(message)] = (message, digest)
        return known[1]

    def same(self, left: Message, right: Message) -> bool:
        """Whether the canonical forms are equal."""
        return left is right or self.digest(left) == self.digest(right)

    def same_masked(self, left: Message, right: Message) -> bool:
        """The same, where `***` in `right` may stand for any one word."""
        if self.same(left, right):
            return True
        first, *rest = _MASK.split(written(self._form(right)).decode())
        wanted = written(self._form(left)).decode()
        if not rest or not wanted.startswith(first):
            return False
        at = len(first)
        for part in rest[:-1]:
            start, at = at, wanted.find(part, at)
            if at < 0 or _BETWEEN_WORDS.search(wanted, start, at):
                return False
            at += len(part)
        end = len(wanted) - len(rest[-1])
        return at <= end and wanted.endswith(rest[-1]) and not _BETWEEN_WORDS.search(wanted, at, end)

    def needed(self, left: Message, right: Message) -> frozenset[str]:
        """The rules without which two messages that are the same would differ."""
        if left == right:
            return frozenset()
        return frozenset(
            name
            for name in self._rules
            if _apply(left, self._rules, leave_out=name) != _apply(right, self._rules, leave_out=name)
        )

    def _form(self, message: Message) -> Message:
        return _apply(message, self._rules)


def is_masked(message: Message) -> bool:
    """Whether something in the message is masked."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [str(content)] if content else []
    calls = message.get("tool_calls")
    return any("***" in text for text in [*texts, *([str(calls)] if calls else [])])


def _apply(message: Message, rules: dict[str, Rule], *, leave_out: str = "") -> Message:
    for name, rule in rules.items():
        if name != leave_out:
            message = rule(message)
    return message


def _digest(form: Message) -> bytes:
    return blake2b(written(form), digest_size=16).digest()


def written(value: Any) -> bytes:
    """Anything that JSON can hold as bytes, also where JSON cannot be written of it."""
    try:
        return _json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair
        return repr(value).encode(errors="backslashreplace")
    except RecursionError:  # arguments can be parsed deeper than they can be written
        return b"too deep to write"
