"""What a gateway remembers of sessions: a cache of the log, good up to a sequence, filled from the log when it lacks
something. Any gateway can serve any session.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from rollyard.gateway.history import ROOT, Canonical, longest, tools_digest
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.refusal import Refusal
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.errors import BusError
from rollyard.schemas.packed import TokenIds

log = structlog.get_logger(__name__)

CATCH_UP_TRIES: Final = 5
_CALL_BYTES: Final = 1000


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call whose end is in the log. Holds only the ids that its parent's ids do not."""

    call_id: str
    parent: KnownCall | None
    chain: bytes
    tools: bytes
    shared_ids: int
    prompt_ids: TokenIds
    completion_ids: TokenIds
    exact: bool
    seq: int

    def ids(self) -> TokenIds:
        """Prompt and sampled ids, whole."""
        path: list[KnownCall] = []
        call: KnownCall | None = self
        while call is not None:
            path.append(call)
            call = call.parent if call.shared_ids else None
        whole = bytearray()
        for step in reversed(path):
            del whole[step.shared_ids * TokenIds.itemsize :]
            whole += step.prompt_ids.data + step.completion_ids.data
        return TokenIds(bytes(whole))


class Session:
    """The calls of one attempt, as far as this gateway knows them."""

    def __init__(self, grant: SessionGrant, canonical: Canonical) -> None:
        self.subject = subjects.log_subject(grant.run, grant.rollout_id, "call")
        self.in_flight = 0
        self.size_bytes = 0
        self._attempt = grant.attempt
        self._canonical = canonical
        self._good_for = 0
        self._lock = asyncio.Lock()
        self._intents: dict[str, CallIntent] = {}
        self._ended: set[str] = set()
        self._calls: dict[str, KnownCall] = {}
        self._by_chain: dict[bytes, KnownCall] = {}
        self._spent_calls = 0
        self._spent_tokens = 0

    def match(self, chains: Sequence[bytes]) -> tuple[KnownCall | None, int]:
        """The call that a request continues, and how many of its messages that covers."""
        return longest(chains, self._by_chain)

    def tokens_left(self, grant: SessionGrant) -> int | None:
        """What may still be sampled. Raises Refusal when a limit of the grant is reached."""
        calls = self._spent_calls + self.in_flight
        if grant.max_calls is not None and calls >= grant.max_calls:
            raise _exceeded("max_calls", grant.max_calls)
        if grant.max_tokens is None:
            return None
        left = grant.max_tokens - self._spent_tokens
        if left <= 0:
            raise _exceeded("max_tokens", grant.max_tokens)
        return left

    def add(self, intent: CallIntent, end: CallEnd, seq: int) -> None:
        """Take a call whose end stands at `seq` in the log. The first end of a call counts."""
        if intent.call_id in self._ended:
            return
        self._ended.add(intent.call_id)
        self.size_bytes += _CALL_BYTES
        if end.status in ("ok", "aborted"):
            self._spent_calls += 1
            self._spent_tokens += max(end.usage.completion_tokens, len(end.completion_ids))
        if end.status != "ok" or end.reply is None:
            return
        parent = self._calls.get(intent.parent) if intent.parent is not None else None
        if intent.parent is not None and parent is None:
            log.warning("call_without_its_parent", call_id=intent.call_id, parent=intent.parent)
            return
        inherits = parent is not None and intent.tools is None
        call = KnownCall(
            call_id=intent.call_id,
            parent=parent,
            chain=self._canonical.fold(parent.chain if parent else ROOT, [*intent.messages, end.reply])[-1],
            tools=parent.tools if parent and inherits else tools_digest(intent.tools),
            shared_ids=end.shared_prompt_ids,
            prompt_ids=end.prompt_ids,
            completion_ids=end.completion_ids,
            exact=bool(end.completion_ids),
            seq=seq,
        )
        self.size_bytes += len(call.prompt_ids.data) + len(call.completion_ids.data)
        self._calls[call.call_id] = call
        # Of several calls with one history and one reply, the latest is the one that the agent goes on from.
        standing = self._by_chain.get(call.chain)
        if standing is None or standing.seq < seq:
            self._by_chain[call.chain] = call

    async def catch_up(self, bus: Bus) -> None:
        """Read what the log holds of this session beyond what is known. Raises BusError."""
        async with self._lock:
            newest = await bus.last(self.subject)
            if newest is None or newest.seq <= self._good_for:
                return
            for left in reversed(range(CATCH_UP_TRIES)):
                try:
                    await self._read(bus, newest.seq)
                    return
                except BusError:
                    if not left:
                        raise
                # The server that answered may be behind the leader.
                await asyncio.sleep(0.1)

    async def _read(self, bus: Bus, until: int) -> None:
        start = self._good_for + 1
        async for stored in bus.read(subjects.LOG, self.subject, start_seq=start, until_seq=until):
            event: CallIntent | CallEnd = decode(stored.data, CallEvent)
            if event.attempt == self._attempt:
                self._take(event, stored.seq)
            self._good_for = stored.seq
        if self._good_for < until:
            raise BusError(f"the server that answered has {self.subject} up to {self._good_for}, not yet {until}")

    def _take(self, event: CallIntent | CallEnd, seq: int) -> None:
        if isinstance(event, CallIntent):
            self._intents[event.call_id] = event
            return
        intent = self._intents.pop(event.call_id, None)
        if intent is not None:
            self.add(intent, event, seq)


class Sessions:
    """All sessions in memory, the least recently used forgotten first when they hold more than `max_bytes`."""

    def __init__(self, canonical: Canonical, max_bytes: int) -> None:
        self._canonical = canonical
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, grant: SessionGrant) -> Session:
        """The session of a grant, empty when nothing is known of it here."""
        key = grant.session()
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(grant, self._canonical)
        self._sessions.move_to_end(key)
        return session

    def drop(self, key: str) -> None:
        """Forget a session that is closed."""
        self._sessions.pop(key, None)

    def trim(self) -> None:
        """Forget what is too much. Sessions with calls in flight stay."""
        held = sum(session.size_bytes for session in self._sessions.values())
        for key in list(self._sessions):
            if held <= self._max_bytes:
                return
            if not self._sessions[key].in_flight:
                held -= self._sessions.pop(key).size_bytes


def _exceeded(what: str, limit: int) -> Refusal:
    return Refusal(
        400,
        "session_limit_exceeded",
        f"this session has reached its limit {what}={limit}",
        hint="the task's agent settings set it; do not retry",
    )
