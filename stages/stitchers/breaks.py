"""Why a call's prompt does not begin with the ids of the call that it goes on from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rollyard.schemas.call import Message
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.sample import DriftPoint, DriftReason
from rollyard.stages.stitchers.graph import Node, Turn, fork, stretch
from rollyard.stages.stitchers.lenience import Matcher, written
from rollyard.stages.stitchers.lineage import Kin

SHOWN_IDS: Final = 16
_SHOWN_CHARS: Final = 120
_BEFORE_CHARS: Final = 20
_FIRST_KEYS: Final = ("role", "content", "reasoning_content", "tool_calls")
_RESYNC_IDS: Final = 4
_TURN_END_IDS: Final = 2
_SEARCHED_IDS: Final = 4096
_SYSTEM: Final = ("system", "developer")
_REASONING: Final = ("reasoning_content", "reasoning")
_OF_REWRITTEN: Final[dict[str, DriftReason]] = {
    "foreign_reply_keys_dropped": "reasoning_stripped",
    "arguments_parsed": "arguments_rewritten",
    "reply_known_by_call_ids": "arguments_rewritten",
    "malformed_tool_input": "arguments_rewritten",
    "volatile_system_lines": "system_changed",
}


def break_of(turn: Turn, kin: Kin, matcher: Matcher) -> DriftPoint:
    """The point at which `turn` leaves the ids of its kin, with its reason."""
    reason, message, detail = _reason(turn, kin, matcher)
    return point(turn, kin.turn, reason, message=message, detail=detail)


def point(
    turn: Turn, earlier: Turn | None, reason: DriftReason, *, message: int | None = None, detail: str = ""
) -> DriftPoint:
    """Where the ids of two calls part."""
    place: Node = fork(turn.prompt, earlier.tip) if earlier is not None else turn.prompt
    return DriftPoint(
        call_id=turn.call_id,
        reason=reason,
        continues=earlier.call_id if earlier is not None else None,
        position=place.depth,
        expected=stretch(earlier.tip, place.depth, SHOWN_IDS) if earlier is not None else TokenIds(),
        found=stretch(turn.prompt, place.depth, SHOWN_IDS),
        message=message,
        detail=detail,
    )


def _reason(turn: Turn, kin: Kin, matcher: Matcher) -> tuple[DriftReason, int | None, str]:
    """The class of the break, the first message that differs, and what differs in it."""
    earlier = kin.turn
    if earlier.end is not None and earlier.end.status != "ok" and earlier.seq < turn.seq:
        return "dead_reply_kept", None, f"the reply of a call that ended as {earlier.end.status} is in the history"
    both = _Both.of(turn, earlier)
    first = both.first_difference(matcher)
    if first is not None:
        return _reason_by_message(both, first, replied=earlier.reply is not None)
    if (turn.intent.tools is not None or turn.named is not earlier) and turn.settings() != earlier.settings():
        return "tools_changed", None, _tools_differ(turn, earlier)
    return _reason_by_echo(turn, earlier, both, matcher) or (_reason_by_ids(turn, earlier), None, "")


@dataclass(frozen=True, slots=True)
class _Both:
    """The messages and the reply of the earlier call, and those of the request, from message `start` on.

    Before it they are the same ones: what a record shares with that of its parent.
    """

    start: int
    logged: list[Message]
    messages: list[Message]

    @classmethod
    def of(cls, turn: Turn, earlier: Turn) -> _Both:
        start = turn.intent.shared_messages if turn.named is earlier else 0
        messages = turn.intent.messages if start else turn.messages()
        logged = earlier.messages()[start:] if start < earlier.count else []
        if earlier.reply is not None and start < earlier.length:
            logged.append(earlier.reply)
        return cls(start, logged, messages)

    def first_difference(self, matcher: Matcher) -> int | None:
        """Where in both the first messages stand that do not match."""
        for index, (left, right) in enumerate(zip(self.logged, self.messages, strict=False)):
            if not matcher.same(left, right):
                return index
        return len(self.messages) if len(self.messages) < len(self.logged) else None


def _reason_by_message(both: _Both, first: int, *, replied: bool) -> tuple[DriftReason, int | None, str]:
    left = both.logged[first]
    right: Message = both.messages[first] if first < len(both.messages) else {}
    place, detail = both.start + first, _differ(left, right)
    if left.get("role") in _SYSTEM or right.get("role") in _SYSTEM:
        return "system_changed", place, detail
    if replied and first == len(both.logged) - 1 and right.get("role") == "assistant":
        if _without_arguments(left) == _without_arguments(right) and left.get("tool_calls"):
            return "arguments_rewritten", place, detail
        if _has_reasoning(left) and not _has_reasoning(right):
            return "reasoning_stripped", place, detail
    return "history_edited", place, detail


def _reason_by_echo(
    turn: Turn, earlier: Turn, both: _Both, matcher: Matcher
) -> tuple[DriftReason, int | None, str] | None:
    """By what the agent changed though the messages count as the same."""
    for index, (left, right) in enumerate(zip(both.logged, both.messages, strict=False), both.start):
        if left is right or left == right:
            continue
        if _has_reasoning(left) and not _has_reasoning(right):
            return "reasoning_stripped", index, _differ(left, right)
        for rule in sorted(matcher.needed(left, right)):
            if rule in _OF_REWRITTEN:
                return _OF_REWRITTEN[rule], index, _differ(left, right)
    for rule in turn.intent.lenience:
        if rule == "foreign_reply_keys_dropped" and not _has_reasoning(earlier.reply or {}):
            continue
        if rule in _OF_REWRITTEN:
            return _OF_REWRITTEN[rule], earlier.length - 1, f"by rule {rule}"
    return None


def _reason_by_ids(turn: Turn, earlier: Turn) -> DriftReason:
    """The messages are the same: by where the ids part, and whether they meet again."""
    place = fork(turn.prompt, earlier.tip)
    expected = stretch(earlier.tip, place.depth, _SEARCHED_IDS)
    found = stretch(turn.prompt, place.depth, _SEARCHED_IDS)
    if _skips(expected, found) and any(map(_has_reasoning, [*earlier.messages(), earlier.reply or {}])):
        return "reasoning_stripped"
    if place.depth < earlier.prompt.depth or earlier.tip.depth - place.depth <= _TURN_END_IDS:
        return "re_templated"
    return "re_tokenised"


def _skips(expected: TokenIds, found: TokenIds) -> bool:
    """Whether `found` goes on with ids that stand later in `expected`: something between was left out."""
    head = found[:_RESYNC_IDS]
    if len(head) < _RESYNC_IDS:
        return False
    item, at = TokenIds.itemsize, 0
    while (at := expected.data.find(head.data, at + 1)) > 0:
        if at % item == 0:
            return True
    return False


def _has_reasoning(message: Message) -> bool:
    return any(message.get(key) for key in _REASONING) or "<think>" in str(message.get("content") or "")


def _without_arguments(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function") if isinstance(call, dict) else call for call in listed]
    named = [function.get("name") if isinstance(function, dict) else function for function in functions]
    return [message.get("content") or "", named]


def _tools_differ(turn: Turn, earlier: Turn) -> str:
    (now, template), (before, earlier_template) = turn.settings(), earlier.settings()
    if template != earlier_template:
        return f"template options {earlier_template} became {template}"[:_SHOWN_CHARS]
    return f"{len(before or ())} tools became {len(now or ())}"


def _differ(left: Message, right: Message) -> str:
    """The first field in which two messages differ, both sides from a little before where they part, for people."""
    if not left or not right:
        return f"a message of role {(left or right).get('role')} is {'new' if right else 'gone'}"
    for key in dict.fromkeys((*_FIRST_KEYS, *left, *right)):
        was, became = (_shown(message.get(key)) for message in (left, right))
        if was != became:
            at = next((i for i, pair in enumerate(zip(was, became, strict=False)) if pair[0] != pair[1]), len(was))
            start = was.rfind(" ", 0, max(0, at - _BEFORE_CHARS)) + 1
            return f"{key}: {_excerpt(was, start)} became {_excerpt(became, start)}"
    return ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "nothing" if value in (None, [], {}) else written(value).decode()


def _excerpt(text: str, start: int) -> str:
    shown = text[start : start + _SHOWN_CHARS]
    return ("..." if start else "") + repr(shown)[1:-1] + ("..." if start + _SHOWN_CHARS < len(text) else "")
