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
        messages = turn.messages()
        found, rules = self._index.find(turn, messages)
        matched = found or known
        if matched is None:
            nearest = self._index.nearest(turn, messages) or turn.named
            return Kin(nearest, same=False) if nearest is not None else None
        if _holds_reply(messages, matched.length):
            nearest = self._index.nearest(turn, messages, matched.length)
            if nearest is not None and nearest.length > matched.length and nearest.thread == turn.thread:
                return Kin(nearest, same=False)
        self.lenience.update(rules)
        return Kin(matched, same=True)


def _holds_reply(messages: Sequence[Message], start: int) -> bool:
    return any(message.get("role") == "assistant" for message in islice(messages, start, None))


def _whole(turn: Turn, named: Turn) -> bool:
    """Whether the gateway found every message of the parent and its reply in the request."""
    shared = turn.intent.shared_messages
    if shared:
        return shared == named.length
    # A snapshot names its parent and shares nothing with its record.
    return named.reply is not None and turn.intent.drift not in _REWRITTEN


class _Index:
    """The places where the replies of a session end."""

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
        chains = fold(self._chain_at(turn.named, turn.intent.shared_messages), self._digests(turn.intent.messages))
        turn.own_chains = chains
        before = chains[-1] if chains else self._chain_at(turn.named, turn.intent.shared_messages)
        self._asked.setdefault(before, []).append(turn)
        if turn.reply is None:
            return
        reply = self._matcher.digest(turn.reply)
        turn.own_chains = [*chains, *fold(before, [reply])]
        self._replies.setdefault(turn.own_chains[-1], []).append(turn)
        self._by_reply.setdefault(reply, []).append(turn)
        self._answered.append(turn)
        last = turn.intent.messages[-1] if turn.intent.messages else None
        if last is not None and last.get("role") == "user" and turn.count > 1:
            place = chains[-2] if len(chains) > 1 else self._chain_at(turn.named, turn.intent.shared_messages)
            self._floating.setdefault(fold(place, [reply])[0], []).append(turn)

    def _digests(self, messages: Sequence[Message]) -> list[bytes]:
        return [self._matcher.digest(message) for message in messages]

    def _chain_at(self, turn: Turn | None, count: int) -> bytes:
        """The chain after the first `count` messages of a call and its reply."""
        if not count:
            return ROOT
        while turn is not None and count <= turn.intent.shared_messages:
            turn = turn.named
        if turn is None or not turn.own_chains:
            return ROOT
        return turn.own_chains[count - turn.intent.shared_messages - 1]

    def find(self, turn: Turn, messages: Sequence[Message]) -> tuple[Turn | None, Iterable[str]]:
        """The call with the most messages that, with its reply, begin a request, and the rules by which they do."""
        found, rules = self._by_chain(turn, messages)
        known = found.length if found is not None else 0
        if MASKED_SECRETS not in self._matcher.off and any(map(is_masked, messages[known:])):
            unmasked = self._unmasked(turn, messages, known)
            if unmasked is not None:
                return unmasked, (MASKED_SECRETS,)
        return found, rules

    def _by_chain(self, turn: Turn, messages: Sequence[Message]) -> tuple[Turn | None, Iterable[str]]:
        chains = fold(ROOT, self._digests(messages))
        for count in range(len(messages), 0, -1):
            if messages[count - 1].get("role") != "assistant":
                continue
            found = _latest(self._replies.get(chains[count - 1], ()), turn)
            if found is not None:
                return found, self._rules(found, messages)
            if FLOATING_USER_MESSAGE not in self._matcher.off:
                found = _latest(self._floating.get(chains[count - 1], ()), turn)
                if found is not None and self._matcher.same(found.intent.messages[-1], messages[-1]):
                    return found, (FLOATING_USER_MESSAGE,)
        return None, ()

    def _rules(self, found: Turn, messages: Sequence[Message]) -> set[str]:
        logged = found.messages()
        if found.reply is not None:
            logged.append(found.reply)
        return {
            rule for left, right in zip(logged, messages, strict=False) for rule in self._matcher.needed(left, right)
        }

    def _unmasked(self, turn: Turn, messages: Sequence[Message], known: int) -> Turn | None:
        """The call of the most messages, more than `known`, that match where `***` hides something."""
        matcher = self._matcher
        for found in sorted(self._answered, key=lambda each: (each.length, each.end_seq), reverse=True):
            if found is turn or found.end_seq > turn.seq or not known < found.length <= len(messages):
                continue
            echo = messages[found.length - 1]
            if echo.get("role") != "assistant" or found.reply is None or not matcher.same_masked(found.reply, echo):
                continue
            if all(map(matcher.same_masked, found.messages(), messages)):
                return found
        return None

    def nearest(self, turn: Turn, messages: Sequence[Message], start: int = 0) -> Turn | None:
        """The call whose reply stands last, or stood where another text stands now, in the messages from `start` on."""
        chains = fold(ROOT, self._digests(messages))
        for count in range(len(messages) - 1, start - 1, -1):
            if messages[count].get("role") != "assistant":
                continue
            asked = self._asked.get(chains[count - 1] if count else ROOT, ())
            failed = [each for each in asked if each.end is not None and each.end.status != "ok"]
            replied = self._by_reply.get(self._matcher.digest(messages[count]), ())
            for candidates in (failed, replied, asked):
                if (found := _latest(candidates, turn)) is not None:
                    return found
        return None


def _latest(candidates: Sequence[Turn], turn: Turn) -> Turn | None:
    """Of calls at one place that ended before `turn` began, one of its thread, the latest."""
    earlier = [each for each in candidates if each is not turn and each.end_seq < turn.seq]
    return max(earlier, key=lambda each: (each.thread == turn.thread, each.end_seq), default=None)
