"""What belongs together without being a prefix: sub-agents, compactions, repeated requests. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from rollyard.schemas.call import Message
from rollyard.stages.stitchers.graph import Turn
from rollyard.stages.stitchers.lenience import LAST_USER_EXTENDED, Matcher
from rollyard.stages.stitchers.lineage import Kin

WORK: Final = ("main", "sub_agent")
"""Scenarios of an agent at its task, beside which the others stand."""
_LEAST_CHARS: Final = 8
_LOOKED_AT: Final = 256
_MARKS: Final = ("cache_control",)


def replaced(turns: Sequence[Turn], kin: Mapping[str, Kin], matcher: Matcher) -> tuple[dict[str, Turn], int]:
    """For each call that repeats a request: the earlier call whose reply the agent never had.

    A reply that something continues was had. Returns with it for how many the rule `last_user_extended` was needed.
    """
    continued = {each.turn.call_id for each in kin.values() if each.same}
    continued |= {turn.parent.call_id for turn in turns if turn.parent is not None}
    by_id = {turn.call_id: turn for turn in turns}
    found: dict[str, Turn] = {}
    for turn in turns:
        dead = by_id.get(turn.intent.supersedes or "")
        if dead is not None and dead.seq < turn.seq and dead.call_id not in continued:
            found[turn.call_id] = dead
    for family in _families(turns):
        _of_same_ids(family, continued, found)
    if LAST_USER_EXTENDED in matcher.off:
        return found, 0
    extended = dict(_extended(turns, continued, matcher))
    return extended | found, len(extended.keys() - found.keys())


def _families(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Calls of one thread with one prompt, those that can be trained, in their order."""
    families: defaultdict[tuple[int, Any], list[Turn]] = defaultdict(list)
    for turn in turns:
        if turn.excluded is None:
            families[id(turn.prompt), turn.thread].append(turn)
    return (family for family in families.values() if len(family) > 1)


def _of_same_ids(family: Sequence[Turn], continued: Collection[str], found: dict[str, Turn]) -> None:
    """A reply that nothing continues is dead when the same was asked again after it ended, or later and continued."""
    last_start = family[-1].seq
    last_continued = max((each.seq for each in family if each.call_id in continued), default=0)
    for index, each in enumerate(family):
        if each.call_id not in continued and (each.end_seq < last_start or each.seq < last_continued):
            later = next(
                (other for other in family[index + 1 :] if other.seq > each.end_seq or other.call_id in continued),
                family[-1],
            )
            if later is not each:
                found.setdefault(later.call_id, each)


def _extended(turns: Sequence[Turn], continued: Collection[str], matcher: Matcher) -> Iterator[tuple[str, Turn]]:
    """A request repeated with more words in its last user message, after a reply that the agent could not use."""
    last: dict[tuple[Any, ...], Turn] = {}
    for turn in turns:
        if turn.broken or not turn.intent.messages or turn.intent.messages[-1].get("role") != "user":
            continue
        place = (turn.thread, turn.count, turn.named.call_id if turn.named is not None else None)
        before = last.get(place)
        last[place] = turn
        if before is None or before.call_id in continued or not 0 < before.end_seq < turn.seq:
            continue
        if _extends(before, turn, matcher):
            yield turn.call_id, before


def _extends(before: Turn, turn: Turn, matcher: Matcher) -> bool:
    """Whether parts were added behind those of the last message. Longer words in one part are another question."""
    old, new = _parts(before.intent.messages[-1]), _parts(turn.intent.messages[-1])
    if not old or len(new) <= len(old):
        return False
    if new[: len(old)] != old:
        return False
    return all(map(matcher.same, before.messages()[:-1], turn.messages()[:-1]))


def _parts(message: Message) -> list[Any]:
    """The parts of its content; cache marks move from part to part and do not count."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"type": "text", "text": content}] if content else []
    return [{k: v for k, v in part.items() if k not in _MARKS} if isinstance(part, dict) else part for part in content]


class Starters:
    """The calls that may have started a sub-agent, in the order in which they ended."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        able = [turn for turn in turns if turn.end is not None and turn.end.status == "ok" and turn.end_seq]
        self._turns = sorted((turn for turn in able if turn.intent.scenario in WORK), key=_ended)
        self._calling = [turn for turn in self._turns if turn.reply is not None and turn.reply.get("tool_calls")]
        self._texts: dict[str, list[str]] = {}

    def find(self, turn: Turn) -> Turn | None:
        """The call whose reply started it: by the words that it was given, else the latest with tool calls.

        A sub-agent begins soon after the call that started it: of those before it only the latest are looked at.
        """
        given = "\n".join(_text(message) for message in turn.messages() if message.get("role") == "user")
        calling = self._before(turn, self._calling)
        for each in calling:
            if any(_tells(text, given) for text in self._arguments(each)):
                return each
        return next(iter(calling or self._before(turn, self._turns)), None)

    def _before(self, turn: Turn, turns: Sequence[Turn]) -> list[Turn]:
        """Those that could have started `turn`, the latest first."""
        count = bisect_left(turns, turn.seq, key=_ended)
        return [each for each in reversed(turns[max(0, count - _LOOKED_AT) : count]) if _could_start(each, turn)]

    def _arguments(self, turn: Turn) -> list[str]:
        texts = self._texts.get(turn.call_id)
        if texts is None:
            texts = self._texts[turn.call_id] = list(_argument_texts(turn.reply or {}))
        return texts


def _ended(turn: Turn) -> int:
    return turn.end_seq


def _could_start(each: Turn, turn: Turn) -> bool:
    if parent := turn.intent.agent.parent_thread:
        return each.intent.agent.thread == parent
    return each.thread != turn.thread or each.intent.scenario == "main"


def _argument_texts(reply: Message) -> Iterator[str]:
    """The texts in the arguments of a reply's tool calls."""
    for call in reply.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(arguments, str):
            continue
        try:
            value: Any = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = arguments
        yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def _tells(text: str, given: str) -> bool:
    text = text.strip()
    return len(text) >= _LEAST_CHARS and (text in given or given.strip() in text)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
