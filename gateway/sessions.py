"""What a gateway remembers of sessions: a cache of the log, good up to a sequence, filled from the log when it lacks
something. Any gateway can serve any session.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec
import structlog

from rollyard.gateway.history import (
    KNOWN_BY_CALL_IDS,
    ROOT,
    Canonical,
    call_ids,
    fold,
    last_equal,
    lenience,
    longest,
    settings_digest,
)
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.refusal import session_limit
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.log import decode_event
from rollyard.schemas import subjects
from rollyard.schemas.call import AgentIds, CallEnd, CallIntent, Message
from rollyard.schemas.errors import BusError
from rollyard.schemas.packed import TokenIds

log = structlog.get_logger(__name__)

CATCH_UP_TRIES: Final = 5
_CALL_BYTES: Final = 1000
NOBODY: Final = AgentIds()
"""An agent that says nothing of itself."""
_encode: Final = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCall:
    """A call whose end is in the log. Holds only what its parent does not.

    `chains` are the chain after each of its own messages and after its reply, `reply` that reply as JSON with sorted
    keys; `walk` counts the records behind `ids`.
    """

    call_id: str
    parent: KnownCall | None
    shared_messages: int = 0
    chains: tuple[bytes, ...] = ()
    reply: bytes = b""
    settings: bytes = ROOT
    shared_ids: int = 0
    prompt_ids: TokenIds
    completion_ids: TokenIds
    exact: bool
    seq: int
    usage_tokens: int = 0
    turn: int = 1
    walk: int = 1

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

    @property
    def length(self) -> int:
        """Messages of the conversation, the reply included."""
        return self.shared_messages + len(self.chains)

    def chain(self, count: int) -> bytes:
        """The chain after the first `count` messages."""
        call: KnownCall = self
        while count <= call.shared_messages and count and call.parent is not None:
            call = call.parent
        return call.chains[count - call.shared_messages - 1] if count else ROOT

    def shared_with(self, chains: Sequence[bytes]) -> int:
        """How many leading messages a request has in common with this conversation."""
        most = min(len(chains), self.length)
        return last_equal(most, lambda count: self.chain(count) == chains[count - 1])


class Session:
    """The calls of one attempt, as far as this gateway knows them."""

    def __init__(self, grant: SessionGrant, canonical: Canonical) -> None:
        self.subject = subjects.log_subject(grant.run, grant.rollout_id, "call")
        self.in_flight = 0
        self.size_bytes = 0
        self._attempt = grant.attempt
        self.canonical = canonical
        self._good_for = 0
        self._lock = asyncio.Lock()
        self._intents: dict[str, CallIntent] = {}
        self._ended: set[str] = set()
        self._calls: dict[str, KnownCall] = {}
        self._by_chain: dict[bytes, KnownCall] = {}
        self._by_reply: dict[bytes, KnownCall] = {}
        self._by_call_ids: dict[tuple[str, ...], bytes] = {}
        self._continued: set[str] = set()
        self._asked: dict[bytes, tuple[int, str]] = {}
        self._spent_calls = 0
        self._spent_tokens = 0

    def digests(self, messages: Sequence[Message], canonical: Sequence[bytes] | None = None) -> list[bytes]:
        """A digest of each message: its canonical form, or the reply that was sent with its tool-call ids.

        `canonical` are the digests of the canonical forms, where they are known.
        """
        digests = list(self.canonical.digests(messages) if canonical is None else canonical)
        if not self.canonical.knows_by_call_ids or not self._by_call_ids:
            return digests
        for index, message in enumerate(messages):
            sent = self._by_call_ids.get(call_ids(message)) if message.get("tool_calls") else None
            if sent is not None and sent != digests[index]:
                self.canonical.counts[KNOWN_BY_CALL_IDS] += 1
                digests[index] = sent
        return digests

    def match(self, chains: Sequence[bytes], agent: AgentIds = NOBODY) -> tuple[KnownCall | None, int]:
        """The call that a request of `agent` continues, and how many of its messages that covers.

        Of twins that said the same it is the one of the agent's own thread.
        """
        found, count = longest(chains, self._by_chain)
        own = self._by_chain.get(chains[count - 1] + _who(agent)) if found is not None else None
        return own or found, count

    def nearest(
        self, digests: Sequence[bytes], chains: Sequence[bytes], agent: AgentIds = NOBODY
    ) -> tuple[KnownCall | None, int, int]:
        """For a request that continues none: the call whose reply stands last in it, how many messages they share, and
        how many there are up to that reply.

        That is what a rewritten history still is a later turn of. `digests` are those of the messages.
        """
        for count in range(len(digests), 0, -1):
            found = self._by_reply.get(digests[count - 1] + _who(agent)) or self._by_reply.get(digests[count - 1])
            if found is not None:
                return found, found.shared_with(chains), count
        return None, 0, 0

    def lenience(self, call: KnownCall, echo: Message) -> tuple[str, ...]:
        """The rules without which an echo of the call's reply would not be the reply as sent."""
        if _encode(echo) == call.reply:
            return ()
        return lenience(msgspec.json.decode(call.reply), echo, self.canonical.off)

    def superseded_by(self, asked: bytes) -> str | None:
        """The call that asked the same before and that nothing continues: the agent never had its reply."""
        _, call_id = self._asked.get(asked, (0, None))
        return call_id if call_id not in self._continued else None

    def tokens_left(self, grant: SessionGrant) -> int | None:
        """What may still be sampled. Raises Refusal when a limit of the grant is reached."""
        calls = self._spent_calls + self.in_flight
        if grant.expires_ms is not None and time.time() * 1000 >= grant.expires_ms:
            raise session_limit("wall time")
        if grant.max_calls is not None and calls >= grant.max_calls:
            raise session_limit(f"max_calls={grant.max_calls}")
        if grant.max_tokens is None:
            return None
        left = grant.max_tokens - self._spent_tokens
        if left <= 0:
            raise session_limit(f"max_tokens={grant.max_tokens}")
        return left

    def add(
        self,
        intent: CallIntent,
        end: CallEnd,
        seq: int,
        *,
        digests: Sequence[bytes] | None = None,
        settings: bytes | None = None,
    ) -> None:
        """Take a call whose end stands at `seq` in the log. The first end of a call counts.

        `digests` of the intent's messages and the digest of its `settings` are worked out where they are not known.
        """
        if intent.call_id in self._ended:
            return
        self._ended.add(intent.call_id)
        self.size_bytes += _CALL_BYTES
        if end.status in ("ok", "aborted"):
            self._spent_calls += 1
            self._spent_tokens += max(end.usage.completion_tokens, len(end.completion_ids))
        parent = self._calls.get(intent.parent) if intent.parent is not None else None
        if intent.parent is not None and parent is None:
            log.warning("call_without_its_parent", call_id=intent.call_id, parent=intent.parent)
            return
        if intent.parent is not None:
            self._continued.add(intent.parent)
        base = parent.chain(intent.shared_messages) if parent else ROOT
        chains = fold(base, self.digests(intent.messages) if digests is None else digests)
        if settings is None:
            inherits = parent is not None and intent.tools is None
            settings = parent.settings if parent and inherits else settings_digest(intent.tools, intent.template)
        told = intent.prompt or end.prompt_ids if intent.prompt is not None else None
        asked = asked_digest(chains[-1] if chains else base, settings, intent.agent, told)
        if self._asked.get(asked, (0, ""))[0] < seq:
            self._asked[asked] = (seq, intent.call_id)
        if end.status == "ok" and end.reply is not None:
            (reply,) = self.canonical.digests([end.reply])
            if ids := call_ids(end.reply):
                self._by_call_ids[ids] = reply
            chains += fold(chains[-1] if chains else base, [reply])
            call = _known(intent, end, parent, chains=tuple(chains), settings=settings, seq=seq)
            self._know(call, reply, _who(intent.agent))

    def _know(self, call: KnownCall, reply: bytes, who: bytes) -> None:
        held = len(call.prompt_ids.data) + len(call.completion_ids.data) + len(call.reply)
        self.size_bytes += held + 64 * len(call.chains)
        self._calls[call.call_id] = call
        # Of several calls with one history and one reply, the latest is the one that the agent goes on from.
        for known, key in ((self._by_chain, call.chains[-1]), (self._by_reply, reply)):
            for place in {key, key + who}:
                standing = known.get(place)
                if standing is None or standing.seq < call.seq:
                    known[place] = call

    async def conversation(self, bus: Bus, call_id: str) -> list[Message] | None:
        """The messages of a call and its reply, read from the log; None when the log has no such call that is ok.

        Raises BusError, BlobError.
        """
        intents: dict[str, CallIntent] = {}
        replies: dict[str, Message] = {}
        async for stored in bus.read(subjects.LOG, self.subject):
            event = decode_event(stored, bus.contents)
            if not isinstance(event, CallIntent | CallEnd) or event.attempt != self._attempt:
                continue
            if isinstance(event, CallIntent):
                intents.setdefault(event.call_id, event)
            elif event.status == "ok" and event.reply is not None:
                replies.setdefault(event.call_id, event.reply)
        if call_id not in intents or call_id not in replies:
            return None
        path = [intents[call_id]]
        while (parent := path[-1].parent) is not None and path[-1].shared_messages:
            path.append(intents[parent])
        messages: list[Message] = []
        for step in reversed(path):
            messages = [*messages[: step.shared_messages], *step.messages, replies[step.call_id]]
        return await bus.contents.with_images(messages)

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
            event = decode_event(stored, bus.contents)
            if isinstance(event, CallIntent | CallEnd) and event.attempt == self._attempt:
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


def _known(
    intent: CallIntent, end: CallEnd, parent: KnownCall | None, *, chains: tuple[bytes, ...], settings: bytes, seq: int
) -> KnownCall:
    inherits = parent is not None and bool(intent.shared_messages or end.shared_prompt_ids)
    return KnownCall(
        call_id=intent.call_id,
        parent=parent,
        shared_messages=intent.shared_messages,
        chains=chains,
        reply=_encode(end.reply),
        settings=settings,
        shared_ids=end.shared_prompt_ids,
        prompt_ids=end.prompt_ids,
        completion_ids=end.completion_ids,
        exact=bool(end.completion_ids),
        seq=seq,
        usage_tokens=end.usage.prompt_tokens + end.usage.completion_tokens,
        turn=parent.turn + 1 if parent else 1,
        walk=parent.walk + 1 if parent and inherits else 1,
    )


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


def asked_digest(chain: bytes, settings: bytes, agent: AgentIds, prompt: str | TokenIds | None = None) -> bytes:
    """What makes two requests the same, streamed or not: conversation, settings, and who within the agent asks.

    `prompt` is what a completion is asked for, text or ids.
    """
    who = _who(agent) or b"\0\0"
    bare = prompt.data if isinstance(prompt, TokenIds) else (prompt or "").encode()
    return blake2b(chain + settings + who + bare, digest_size=16).digest()


def _who(agent: AgentIds) -> bytes:
    """Which thread within a session asks; empty where the agent does not say."""
    return f"{agent.thread}\0{agent.sub_agent}\0".encode() if agent.thread or agent.sub_agent else b""
