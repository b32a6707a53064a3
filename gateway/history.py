"""Which earlier call a request continues: its messages in a canonical form, folded into a chain of digests. Pure.

Agents do not echo a conversation as they got it: they move cache marks, compact tool arguments, rename ids, drop
nulls. Two messages are equal when their canonical forms are. Each rule has a name, is counted, and can be switched off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, TypeVar

import msgspec

from rollyard.pipeline.images import by_content
from rollyard.schemas.call import Message
from rollyard.schemas.packed import TokenIds

T = TypeVar("T")
ROOT: Final = b""
Rule = Callable[[Message], Message]
_json: Final = msgspec.json.Encoder(order="sorted")
_OWN_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def _drop_private(message: Message) -> Message:
    """Keys that an adapter keeps a protocol's own form in: what they say stands in the message as well."""
    content = message.get("content")
    if isinstance(content, list) and any(_has_private(part) for part in content):
        message = {**message, "content": [_without_private(part) for part in content]}
    bare: Message = _without_private(message) if _has_private(message) else message
    return bare


def _has_private(value: Any) -> bool:
    return isinstance(value, dict) and any(key.startswith("_") for key in value)


def _without_private(value: Any) -> Any:
    return {k: v for k, v in value.items() if not k.startswith("_")} if isinstance(value, dict) else value


def without_private(messages: Sequence[Message]) -> list[Message]:
    """Messages as a model server takes them, without the keys that adapters keep for themselves."""
    return [_drop_private(message) for message in messages]


def call_ids(message: Message) -> tuple[str, ...]:
    """The ids of a reply's tool calls, letters and digits of them, which no agent changes; empty where it has none."""
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    if not isinstance(calls, list):
        return ()
    ids = [str(call.get("id", "")) if isinstance(call, dict) else "" for call in calls]
    bare = tuple("".join(filter(str.isalnum, each)) for each in ids)
    return bare if all(bare) else ()


def _drop_cache_control(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list) and any("cache_control" in part for part in content if isinstance(part, dict)):
        message = {**message, "content": [_without(part, "cache_control") for part in content]}
    bare: Message = _without(message, "cache_control")
    return bare


def _drop_foreign_keys(message: Message) -> Message:
    if message.get("role") != "assistant" or message.keys() <= _OWN_KEYS:
        return message
    return {key: value for key, value in message.items() if key in _OWN_KEYS}


def _drop_ids(message: Message) -> Message:
    message = _without(message, "tool_call_id", "id")
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "tool_calls": [_without(call, "id", "index") for call in calls]}


def _join_text(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return message
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}


def _trim_reply(message: Message) -> Message:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or content == content.strip():
        return message
    return {**message, "content": content.strip()}


def _parse_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _drop_nulls(message: Message) -> Message:
    if all(value not in (None, "", []) for value in message.values()):
        return message
    return {key: value for key, value in message.items() if value not in (None, "", [])}


RULES: Final[dict[str, Rule]] = {
    "private_keys_dropped": _drop_private,
    "images_by_content": by_content,
    "cache_control_dropped": _drop_cache_control,
    "foreign_reply_keys_dropped": _drop_foreign_keys,
    "ids_not_compared": _drop_ids,
    "text_parts_joined": _join_text,
    "reply_edges_trimmed": _trim_reply,
    "arguments_parsed": _parse_arguments,
    "null_equals_absent": _drop_nulls,
}
"""In this order: a list of text parts is a string before its edges are trimmed, and an empty one is absent."""

_HIDES_MOST: Final = "foreign_reply_keys_dropped"

KNOWN_BY_CALL_IDS: Final = "reply_known_by_call_ids"
"""A reply with tool calls is the one whose ids it bears, also where the agent has rewritten their arguments."""


class Canonical:
    """Canonical forms under the rules that are switched on. `counts` says how many messages each rule changed."""

    def __init__(self, off: Collection[str] = ()) -> None:
        self.off = frozenset(off)
        self.rules = {name: rule for name, rule in RULES.items() if name not in off}
        self.knows_by_call_ids = KNOWN_BY_CALL_IDS not in off
        self.counts: Counter[str] = Counter()

    def form(self, message: Message) -> bytes:
        """The canonical form of a message as JSON."""
        original = message
        for name, rule in self.rules.items():
            changed = rule(message)
            if changed is not message:
                self.counts[name] += 1
                message = changed
        try:
            return _json.encode(message)
        except RecursionError:  # arguments can be parsed deeper than they can be written
            return _json.encode(original)

    def digests(self, messages: Sequence[Message]) -> list[bytes]:
        """A digest of the canonical form of each message."""
        return [blake2b(self.form(message), digest_size=16).digest() for message in messages]

    def fold(self, chain: bytes, messages: Sequence[Message]) -> list[bytes]:
        """The chain after each of `messages`, beginning from `chain` (ROOT: an empty conversation)."""
        return fold(chain, self.digests(messages))


def lenience(sent: Message, echoed: Message, off: Collection[str] = ()) -> tuple[str, ...]:
    """A smallest set of rules, but for those in `off`, under which an agent's echo of a reply is the reply as sent.

    Empty where they are equal as they are, and where no rules make them so.
    """
    if sent == echoed:
        return ()
    rules = {name: rule for name, rule in RULES.items() if name not in off}
    needed = _needed(sent, echoed, rules)
    if needed is not None or KNOWN_BY_CALL_IDS in off or not call_ids(sent) or call_ids(sent) != call_ids(echoed):
        return needed or ()
    # What became of the arguments is settled by the ids; the rest of the message is not.
    return KNOWN_BY_CALL_IDS, *(_needed(sent, {**echoed, "tool_calls": sent["tool_calls"]}, rules) or ())


def _needed(sent: Message, echoed: Message, rules: Mapping[str, Rule]) -> tuple[str, ...] | None:
    """Those of the rules without which two messages differ; None when they differ under all of them."""
    # A rule looks at each key by itself, so those with equal values cannot tell.
    equal = {key for key in sent.keys() & echoed.keys() if key != "role" and sent[key] == echoed[key]}
    pair = (_without(sent, *equal), _without(echoed, *equal))
    at_work = _at_work(rules, pair)
    if at_work is None:
        return None
    # The rule that hides most is the first to be done without: a key that is null was not dropped.
    untried = [_HIDES_MOST] if _HIDES_MOST in rules else sorted(at_work)
    tried: set[str] = set()
    while untried:
        name = untried[0]
        tried.add(name)
        fewer = {other: rule for other, rule in rules.items() if other != name}
        still = _at_work(fewer, pair)
        if still is not None:
            rules, at_work = fewer, still
        untried = sorted(at_work - tried)
    return tuple(name for name in rules if name in at_work)


def _at_work(rules: Mapping[str, Rule], pair: tuple[Message, Message]) -> set[str] | None:
    """The rules that change one of two messages; None when these still differ."""
    one, other = pair
    found: set[str] = set()
    for name, rule in rules.items():
        changed, changed_other = rule(one), rule(other)
        if changed is not one or changed_other is not other:
            found.add(name)
        one, other = changed, changed_other
    return found if one == other else None


def fold(chain: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """The chain after each message of these digests."""
    chains = []
    for digest in digests:
        chain = blake2b(chain + digest, digest_size=16).digest()
        chains.append(chain)
    return chains


def longest(chains: Sequence[bytes], known: Mapping[bytes, T]) -> tuple[T | None, int]:
    """The call whose messages and reply are the longest prefix of a request, and how many messages that is."""
    for count in range(len(chains), 0, -1):
        found = known.get(chains[count - 1])
        if found is not None:
            return found, count
    return None, 0


def holds_unknown_reply(messages: Sequence[Message], shared: int) -> bool:
    """Whether there is a reply after the first `shared` messages."""
    return any(message.get("role") == "assistant" for message in messages[shared:])


def settings_digest(tools: Sequence[Message] | None, template: Mapping[str, Any] | None = None) -> bytes:
    """A digest of what else stands in a prompt: tool definitions, cache marks left out, and options of the template.

    None and an empty list of tools are the same.
    """
    if not tools and not template:
        return ROOT
    bare = [_without(tool, "cache_control") for tool in tools or ()]
    return blake2b(_json.encode([bare, template or {}]), digest_size=16).digest()


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many leading ids are equal."""
    return len(a) if b.startswith(a) else last_equal(min(len(a), len(b)), lambda count: a[:count] == b[:count])


def last_equal(most: int, equal: Callable[[int], bool]) -> int:
    """The highest count up to `most` for which `equal` holds; it holds for all below it as well, and for 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if equal(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _without(value: Any, *keys: str) -> Any:  # a message part may be anything
    if not isinstance(value, dict) or not any(key in value for key in keys):
        return value
    return {key: item for key, item in value.items() if key not in keys}
