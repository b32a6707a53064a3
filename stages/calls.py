"""The events of a session to its calls: intents joined with ends, deltas resolved. Pure.

Contract: docs/architecture.md sections 5.3 and 5.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rollyard.schemas.call import CallEnd, CallEvent, CallIntent, CallRecord, Message
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.rollout import RolloutEvent
from rollyard.schemas.sample import Commit

Event = CallEvent | RolloutEvent | Commit
_E = TypeVar("_E", CallIntent, CallEnd)


def resolve(events: Iterable[tuple[int, CallEvent]]) -> list[CallRecord]:
    """Join intents with ends and resolve the deltas. Ordered by sequence of the intent; input order does not matter.

    Of duplicates the one with the lower sequence counts. A call without end keeps end None. An end without intent gets
    an intent of its ids only, with intent_seq 0, and, as every record whose parent cannot be resolved, says so in
    `broken`.
    """
    intents, ends = by_call(events)
    resolved: dict[str, CallRecord] = {}
    # A parent's end is acknowledged before a child's intent is written: parents come first in the log.
    for call_id, (seq, intent) in sorted(intents.items(), key=lambda item: item[1][0]):
        resolved[call_id] = _resolve_one(seq, intent, ends.get(call_id), resolved)
    orphans = sorted((ends[call_id] for call_id in ends.keys() - intents.keys()), key=lambda item: item[0])
    return [_orphan(seq, end) for seq, end in orphans] + list(resolved.values())


def by_call(
    events: Iterable[tuple[int, CallEvent]],
) -> tuple[dict[str, tuple[int, CallIntent]], dict[str, tuple[int, CallEnd]]]:
    """Intents and ends by call, each with its sequence: of duplicates the one with the lower sequence."""
    intents: dict[str, tuple[int, CallIntent]] = {}
    ends: dict[str, tuple[int, CallEnd]] = {}
    for seq, event in events:
        if isinstance(event, CallIntent):
            _keep_lower(intents, seq, event)
        else:
            _keep_lower(ends, seq, event)
    return intents, ends


def _keep_lower(kept: dict[str, tuple[int, _E]], seq: int, event: _E) -> None:
    standing = kept.get(event.call_id)
    if standing is None or seq < standing[0]:
        kept[event.call_id] = (seq, event)


def _resolve_one(
    seq: int, intent: CallIntent, ended: tuple[int, CallEnd] | None, resolved: Mapping[str, CallRecord]
) -> CallRecord:
    end_seq, end = ended if ended is not None else (0, None)
    parent = resolved.get(intent.parent) if intent.parent is not None else None
    messages: list[Message] = list(parent.messages) if parent else []
    if parent and parent.end and parent.end.reply is not None:
        messages.append(parent.end.reply)
    shared_ids = end.shared_prompt_ids if end else 0
    parent_ids = full_ids(parent) if parent else b""
    broken = None
    if intent.parent is not None and parent is None:
        broken = f"parent {intent.parent} is not in the log before it"
    elif parent and parent.broken:
        broken = f"parent {parent.intent.call_id} is broken"
    elif intent.shared_messages > len(messages):
        broken = f"shares {intent.shared_messages} messages, its parent has {len(messages)}"
    elif shared_ids * TokenIds.itemsize > len(parent_ids):
        broken = f"shares {shared_ids} ids, its parent has {len(parent_ids) // TokenIds.itemsize}"
    new_ids = end.prompt_ids.data if end else b""
    return CallRecord(
        intent=intent,
        end=end,
        intent_seq=seq,
        end_seq=end_seq,
        messages=messages[: intent.shared_messages] + intent.messages,
        tools=parent.tools if intent.tools is None and parent else intent.tools,
        prompt_ids=TokenIds(parent_ids[: shared_ids * TokenIds.itemsize] + new_ids),
        broken=broken,
    )


def bare_intent(end: CallEnd) -> CallIntent:
    """In the place of an intent that is not in the log: what the end tells of it, its ids only."""
    return CallIntent(
        call_id=end.call_id,
        run=end.run,
        rollout_id=end.rollout_id,
        attempt=end.attempt,
        gateway="",
        at_ms=end.at_ms,
        latest_end_ms=end.at_ms,
    )


def _orphan(seq: int, end: CallEnd) -> CallRecord:
    return CallRecord(
        intent=bare_intent(end),
        end=end,
        intent_seq=0,
        end_seq=seq,
        messages=[],
        tools=None,
        prompt_ids=TokenIds(),
        broken="there is an end but no intent",
    )


def full_ids(record: CallRecord) -> bytes:
    """Prompt and sampled ids: what a continuation must start with."""
    return record.prompt_ids.data + record.end.completion_ids.data if record.end else record.prompt_ids.data


def open_calls(events: Iterable[tuple[int, Event]], attempt: int, closed_seq: int) -> list[CallIntent]:
    """Intents of an attempt without an end, in log order. Those logged after `closed_seq` (0: none) do not count."""
    intents: dict[str, tuple[int, CallIntent]] = {}
    ended: set[str] = set()
    for seq, event in events:
        if isinstance(event, CallEnd):
            ended.add(event.call_id)
        elif isinstance(event, CallIntent) and event.attempt == attempt and (not closed_seq or seq < closed_seq):
            _keep_lower(intents, seq, event)
    return [intent for _, intent in sorted(intents.values(), key=lambda item: item[0]) if intent.call_id not in ended]
