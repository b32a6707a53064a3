"""What belongs together without being a prefix: sub-agents, compactions, repeated requests. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from rollyard.schemas.call import Message
from rollyard.stages.stitchers.graph import Turn
from rollyard.stages.stitchers.lenience import LAST_USER_EXTENDED, Matcher
from rollyard.stages.stitchers.lineage import Kin

_WORK: Final = ("main", "sub_agent")
_LEAST_CHARS: Final = 8


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
    if not all(matcher.same(_as_user(left), _as_user(right)) for left, right in zip(old, new, strict=False)):
        return False
    return all(map(matcher.same, before.messages()[:-1], turn.messages()[:-1]))


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _as_user(part: Any) -> Message:
    return {"role": "user", "content": [part]}


def starter(turn: Turn, turns: Sequence[Turn]) -> Turn | None:
    """The call whose reply started a sub-agent: by the words that it was given, else the latest with tool calls."""
    given = "\n".join(_text(message) for message in turn.messages() if message.get("role") == "user")
    latest: Turn | None = None
    calling: Turn | None = None
    for each in reversed(turns):
        if not 0 < each.end_seq < turn.seq or not _could_start(each, turn):
            continue
        latest = latest or each
        if each.reply is not None and each.reply.get("tool_calls"):
            calling = calling or each
            if any(_tells(text, given) for text in _argument_texts(each.reply)):
                return each
    return calling or latest


def _could_start(each: Turn, turn: Turn) -> bool:
    if each.end is None or each.end.status != "ok" or each.intent.scenario not in _WORK:
        return False
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
