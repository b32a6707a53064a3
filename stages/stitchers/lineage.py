"""Which call each call goes on from: by its record where the gateway knew it, else by lenient matching of messages.

Messages form a graph: a chain of digests, folded over tool definitions and messages, is a place in it; a reply ends at
one place, and a request that stands there, however it was written anew, goes on from that reply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from rollyard.gateway.history import ROOT, fold
from rollyard.schemas.call import Message
from rollyard.stages.stitchers.graph import Turn
from rollyard.stages.stitchers.lenience import FLOATING_USER_MESSAGE, MASKED_SECRETS, Matcher, is_masked

_REWRITTEN: Final = ("system_changed", "history_edited")


@dataclass(frozen=True, slots=True)
class Kin:
    """What a call goes on from. `same`: all messages up to its reply are matched; else it is the nearest."""

    turn: Turn
    same: bool


class Lineage:
    """The kin of every call of a session, looked up in the order of the calls."""

    def __init__(self, turns: Sequence[Turn], matcher: Matcher) -> None:
        self.matcher = matcher
        self.lenience: Counter[str] = Counter()
        self.kin: dict[str, Kin] = {}
        self._turns = turns
        self._index: _Index | None = None
        self._threads: set[tuple[str, str, str]] = set()
        for turn in turns:
            if not turn.broken and turn.intent.prompt is None:
                found = self._find(turn)
                if found is not None:
                    self.kin[turn.call_id] = found
            self._threads.add(turn.thread)

    def _find(self, turn: Turn) -> Kin | None:
        intent, named = turn.intent, turn.named
        whole = named is not None and _whole(turn, named) and self.matcher.off.isdisjoint(intent.lenience)
        known = named.length - intent.shared_messages if named is not None and whole else 0
        replied = _holds_reply(intent.messages, known)
        # Two threads may have had the same reply to the same words: the record cannot tell them apart. And a reply
        # behind those that the gateway knew again is one of a later call, before which something was rewritten.
        alone = named is not None and (named.thread == turn.thread or turn.thread not in self._threads)
        if named is not None and whole and not replied and alone:
            if intent.lenience:
                self.lenience.update(intent.lenience)
            return Kin(named, same=True)
        if named is None and not replied:
            return None
        return self._search(turn, named if whole else None)

    def _search(self, turn: Turn, known: Turn | None) -> Kin | None:
        """By the messages. `known` is a call that the request goes on from, if the gateway found one.

        A reply of the same thread further on in the request tells that the conversation went further than what matches.
        """
        if self._index is None:
            self._index = _Index(self._turns, self.matcher)
        found, rules = self._index.find(turn)
        matched = found or known
        if matched is None:
            nearest = self._index.nearest(turn) or turn.named
            return Kin(nearest, same=False) if nearest is not None else None
        behind = max(0, matched.length - turn.intent.shared_messages)
        if _holds_reply(turn.intent.messages, behind):
            nearest = self._index.nearest(turn, behind)
            if nearest is not None and nearest.length > matched.length and nearest.thread == turn.thread:
                return Kin(nearest, same=False)
        self.lenience.update(rules)
        return Kin(matched, same=True)


def _holds_reply(messages: Sequence[Message], start: int) -> bool:
    return "assistant" in [message.get("role") for message in islice(messages, start, None)]


def _whole(turn: Turn, named: Turn) -> bool:
    """Whether the gateway found every message of the parent and its reply in the request."""
    shared = turn.intent.shared_messages
    if shared:
        return shared == named.length
    # A snapshot names its parent and shares nothing with its record.
    return named.reply is not None and turn.intent.drift not in _REWRITTEN


class _Index:
    """The places where the replies of a session end.

    What a request shares with the parent in its record need not be looked at again: there stand the parent's chains.
    """

    def __init__(self, turns: Iterable[Turn], matcher: Matcher) -> None:
        self._matcher = matcher
        self._replies: dict[bytes, list[Turn]] = {}
        self._floating: dict[bytes, list[Turn]] = {}
        self._asked: dict[bytes, list[Turn]] = {}
        self._by_reply: dict[bytes, list[Turn]] = {}
        self._answered: list[Turn] = []
        for turn in turns:
            if not turn.broken and turn.intent.prompt is None:
                self._add(turn)

    def _add(self, turn: Turn) -> None:
        base = _chain_at(turn.named, turn.intent.shared_messages)
        turn.own_chains = fold(base, [self._matcher.digest(message) for message in turn.intent.messages])
        before = turn.own_chains[-1] if turn.own_chains else base
        self._asked.setdefault(before, []).append(turn)
        if turn.reply is None:
            return
        reply = self._matcher.digest(turn.reply)
        last = turn.intent.messages[-1] if turn.intent.messages else None
        if last is not None and last.get("role") == "user" and turn.count > 1:
            place = turn.own_chains[-2] if len(turn.own_chains) > 1 else base
            self._floating.setdefault(fold(place, [reply])[0], []).append(turn)
        turn.own_chains += fold(before, [reply])
        self._replies.setdefault(turn.own_chains[-1], []).append(turn)
        self._by_reply.setdefault(reply, []).append(turn)
        self._answered.append(turn)

    def find(self, turn: Turn) -> tuple[Turn | None, Iterable[str]]:
        """The call with the most messages that, with its reply, begin a request, and the rules by which they do."""
        found, rules = self._by_chain(turn)
        if MASKED_SECRETS not in self._matcher.off and any(map(is_masked, turn.intent.messages)):
            unmasked = self._unmasked(turn, found.length if found is not None else 0)
            if unmasked is not None:
                return unmasked, (MASKED_SECRETS,)
        return found, rules

    def _by_chain(self, turn: Turn) -> tuple[Turn | None, Iterable[str]]:
        own, chains = turn.intent.messages, turn.own_chains or []
        for index in range(len(own) - 1, -1, -1):
            if own[index].get("role") != "assistant":
                continue
            found = _latest(self._replies.get(chains[index], ()), turn)
            if found is not None:
                return found, self._rules(found, turn)
            if FLOATING_USER_MESSAGE not in self._matcher.off:
                found = _latest(self._floating.get(chains[index], ()), turn)
                if found is not None and self._matcher.same(found.intent.messages[-1], own[-1]):
                    return found, (FLOATING_USER_MESSAGE,)
        above = _answered_above(turn)
        if above is None or not above.own_chains:
            return None, ()
        return _latest(self._replies.get(above.own_chains[-1], ()), turn), ()

    def _rules(self, found: Turn, turn: Turn) -> set[str]:
        start = turn.intent.shared_messages if found is turn.named else 0
        logged, messages = found.messages(), turn.messages()
        if found.reply is not None:
            logged.append(found.reply)
        pairs = zip(logged[start:], messages[start:], strict=False)
        return {rule for left, right in pairs if left is not right for rule in self._matcher.needed(left, right)}

    def _unmasked(self, turn: Turn, known: int) -> Turn | None:
        """The call of the most messages, more than `known`, that match where `***` hides something."""
        matcher, messages = self._matcher, turn.messages()
        for found in sorted(self._answered, key=lambda each: (each.length, each.end_seq), reverse=True):
            if found is turn or found.end_seq > turn.seq or not known < found.length <= len(messages):
                continue
            echo = messages[found.length - 1]
            if echo.get("role") != "assistant" or found.reply is None or not matcher.same_masked(found.reply, echo):
                continue
            if all(map(matcher.same_masked, found.messages(), messages)):
                return found
        return None

    def nearest(self, turn: Turn, start: int = 0) -> Turn | None:
        """The call whose reply stands last, or stood where another text stands now, in the request's own messages from
        `start` on; else the last whose reply it shares with its parent."""
        own, chains = turn.intent.messages, turn.own_chains or []
        for index in range(len(own) - 1, start - 1, -1):
            if own[index].get("role") != "assistant":
                continue
            before = chains[index - 1] if index else _chain_at(turn.named, turn.intent.shared_messages)
            asked = self._asked.get(before, ())
            failed = [each for each in asked if each.end is not None and each.end.status != "ok"]
            for candidates in (failed, self._by_reply.get(self._matcher.digest(own[index]), ()), asked):
                if (found := _latest(candidates, turn)) is not None:
                    return found
        return _answered_above(turn)


def _chain_at(turn: Turn | None, count: int) -> bytes:
    """The chain after the first `count` messages of a call and its reply."""
    if not count:
        return ROOT
    while turn is not None and count <= turn.intent.shared_messages:
        turn = turn.named
    if turn is None or not turn.own_chains:
        return ROOT
    return turn.own_chains[count - turn.intent.shared_messages - 1]


def _answered_above(turn: Turn) -> Turn | None:
    """Of the calls on the way to this one the last whose reply is among the messages that they share."""
    limit, above = turn.intent.shared_messages, turn.named
    while above is not None and (above.length > limit or above.reply is None):
        limit, above = min(limit, above.intent.shared_messages), above.named
    return above if limit else None


def _latest(candidates: Sequence[Turn], turn: Turn) -> Turn | None:
    """Of calls at one place that ended before `turn` began, one of its thread, the latest."""
    earlier = [each for each in candidates if each is not turn and each.end_seq < turn.seq]
    return max(earlier, key=lambda each: (each.thread == turn.thread, each.end_seq), default=None)
