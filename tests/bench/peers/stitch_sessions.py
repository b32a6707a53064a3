"""Sessions to stitch: an agent with sub-agents between its turns and a compaction, and what is true of them.

Each session is there twice: as the events that a gateway logs, made by the gateway's own matching, deltas and
snapshots; and as whole calls, which is what other stitchers take. All text and ids are made up.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.history import ROOT, Canonical, common_prefix, fold, settings_digest
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.planning import Place, as_delta, snapshot_due
from rollyard.gateway.sessions import Session as KnownSession
from rollyard.gateway.sessions import asked_digest
from rollyard.pipeline.codec import encode
from rollyard.pipeline.contents import Contents
from rollyard.schemas.call import AgentIds, CallEnd, CallIntent, CallTimings, Usage
from rollyard.schemas.packed import Logprobs, TokenIds, to_wire
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit

Message = dict[str, Any]

VOCABULARY: Final = 150_000
SYSTEM_IDS: Final = 1200
"""Ids of the system prompt with the tool definitions in it."""
RESULT_IDS: Final = 125
REPLY_IDS: Final = 60
SCAFFOLD_IDS: Final = 4
"""Ids that a template puts before a reply."""
CHARS_PER_ID: Final = 4
_WORDS: Final = tuple(
    f"{one}{other}" for one in ("re", "un", "de", "pro") for other in ("build", "test", "line", "int")
)


@dataclass(eq=False)
class Call:
    """One call as it really was. `spans` are the ids [start, end) of each message of the request."""

    call_id: str
    parent: Call | None
    scenario: str
    agent: AgentIds
    messages: list[Message]
    spans: list[tuple[int, int]]
    prompt: bytes
    sampled: bytes
    logprobs: bytes
    reply: Message
    number: int = 0


@dataclass(eq=False)
class Thread:
    """A conversation that only grows: messages, where their ids stand, digests, and the last call."""

    agent: AgentIds
    scenario: str
    messages: list[Message] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    ids: bytearray = field(default_factory=bytearray)
    digests: list[bytes] = field(default_factory=list)
    last: Call | None = None


@dataclass
class Session:
    """A session with `turns` turns of its main agent, and the log of it."""

    turns: int
    seed: int
    events: list[tuple[int, CallIntent | CallEnd | RolloutEvent]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.turns} {self.seed}")
        self._canonical = Canonical()
        self._rollout = Rollout.of("bench", f"task{self.seed}", 0, 1)
        grant = SessionGrant(run="bench", rollout_id=self._rollout.rollout_id, attempt=1)
        self._known = KnownSession(grant, self._canonical)
        self._tools = [self._tool(number) for number in range(12)]
        self._owed: dict[str, tuple[CallIntent, CallEnd, list[bytes], bytes]] = {}
        self._seq = 0
        self._play()

    # --- what happens ---

    def _play(self) -> None:
        """Turns with sub-agents between them; after three quarters of them the conversation is condensed."""
        starts = {self.turns // 5, self.turns // 2}
        compaction = self.turns * 3 // 4
        main = self._thread("main", "You are an agent that mends programs.")
        self._say(main, {"role": "user", "content": self._text(150)}, 150)
        running: list[tuple[Thread, int]] = []
        for turn in range(self.turns):
            call = self._ask(main, spawn=turn in starts)
            # Calls of several agents are in flight together: they end in the order in which they began.
            others = [self._ask(thread) for thread, _ in running]
            for each in (call, *others):
                self._end(each)
            for thread, _ in running:
                self._result(thread)
            running = [(thread, left - 1) for thread, left in running if left > 1]
            if turn in starts:
                running.append((self._sub_agent(call), max(1, self.turns // 10)))
            self._result(main)
            if turn + 1 == compaction:
                main = self._compact(main)

    def _thread(self, name: str, role: str, scenario: str = "main", parent: str = "") -> Thread:
        agent = AgentIds(client="agent/1.0", session=f"session{self.seed}", thread=name, parent_thread=parent)
        thread = Thread(agent, scenario)
        self._say(thread, {"role": "system", "content": f"{role}\n{self._text(SYSTEM_IDS // 2)}"}, SYSTEM_IDS)
        return thread

    def _sub_agent(self, starter: Call) -> Thread:
        thread = self._thread(f"sub{starter.number}", "You are a sub-agent.", "sub_agent", "main")
        told = starter.reply["tool_calls"][0]["function"]["arguments"]
        self._say(thread, {"role": "user", "content": told[len('{"prompt": "') : -len('"}')]}, 60)
        return thread

    def _compact(self, main: Thread) -> Thread:
        demand = Thread(main.agent, "compaction", main.messages[:], main.spans[:], main.ids[:], main.digests[:])
        demand.last = main.last
        self._say(demand, {"role": "user", "content": "Sum up the conversation. " + self._text(120)}, 125)
        summary = self._ask(demand, ids=300)
        self._end(summary)
        after = Thread(main.agent, "main")
        # The system prompt is the same one, so that both conversations begin with the same ids.
        self._say(after, main.messages[0], 0, bytes(main.ids[: SYSTEM_IDS * TokenIds.itemsize]))
        told = f"This conversation goes on from another one. {summary.reply['content']}"
        self._say(after, {"role": "user", "content": told}, 320)
        return after

    def _result(self, thread: Thread) -> None:
        assert thread.last is not None
        count = max(8, int(self._rng.expovariate(1 / RESULT_IDS)))
        call_id = thread.last.reply["tool_calls"][0]["id"]
        self._say(thread, {"role": "tool", "tool_call_id": call_id, "content": self._text(count)}, count)

    def _say(self, thread: Thread, message: Message, count: int, ids: bytes = b"") -> None:
        start = len(thread.ids) // TokenIds.itemsize
        thread.ids += ids or self._ids(count)
        thread.messages.append(message)
        thread.spans.append((start, len(thread.ids) // TokenIds.itemsize))
        thread.digests += self._canonical.digests([message])

    # --- what is made up ---

    def _ids(self, count: int) -> bytes:
        return TokenIds.of(self._rng.choices(range(VOCABULARY), k=count)).data

    def _text(self, ids: int) -> str:
        size = ids * CHARS_PER_ID
        return " ".join(self._rng.choices(_WORDS, k=size // 7 + 1))[:size]

    def _tool(self, number: int) -> Message:
        properties = {"command": {"type": "string", "description": self._text(12)}}
        parameters = {"type": "object", "properties": properties, "required": ["command"]}
        named = {"name": f"tool{number}", "description": self._text(60), "parameters": parameters}
        return {"type": "function", "function": named}

    def _reply(self, number: int, spawn: bool, ids: int) -> Message:
        if ids:
            return {"role": "assistant", "content": self._text(ids)}
        name, arguments = ("task", {"prompt": self._text(40)}) if spawn else ("tool1", {"command": self._text(25)})
        key, value = next(iter(arguments.items()))
        function = {"name": name, "arguments": f'{{"{key}": "{value}"}}'}
        calls = [{"id": f"call_{number:08}", "type": "function", "function": function}]
        return {"role": "assistant", "content": self._text(20), "tool_calls": calls}

    # --- what is logged ---

    def _ask(self, thread: Thread, *, spawn: bool = False, ids: int = 0) -> Call:
        number = len(self.calls)
        count = ids or max(8, int(self._rng.expovariate(1 / REPLY_IDS)))
        sampled = self._ids(count)
        call = Call(
            call_id=blake2b(f"{self.seed} {number}".encode(), digest_size=16).hexdigest(),
            parent=thread.last,
            scenario=thread.scenario,
            agent=thread.agent,
            messages=thread.messages[:],
            spans=thread.spans[:],
            prompt=bytes(thread.ids) + self._ids(SCAFFOLD_IDS),
            sampled=sampled,
            logprobs=Logprobs.of(-self._rng.expovariate(3) for _ in range(count)).data,
            reply=self._reply(number, spawn, ids),
            number=number,
        )
        self.calls.append(call)
        thread.last = call
        self._log_intent(thread, call)
        self._say(thread, call.reply, 0, call.prompt[len(thread.ids) :] + sampled)
        return call

    def _log(self, event: CallIntent | CallEnd | RolloutEvent) -> int:
        self._seq += self._rng.randint(1, 3)
        self.events.append((self._seq, event))
        return self._seq

    def _named(self, call: Call) -> dict[str, Any]:
        return {
            "call_id": call.call_id,
            "run": "bench",
            "rollout_id": self._rollout.rollout_id,
            "attempt": 1,
            "at_ms": 1_790_000_000_000 + 3000 * call.number,
        }

    def _log_intent(self, thread: Thread, call: Call) -> None:
        parent, shared = self._known.match(fold(ROOT, thread.digests))
        settings = settings_digest(self._tools)
        place = Place(
            parent=parent,
            shared=shared,
            digests=thread.digests[:],
            settings=settings,
            asked=asked_digest(fold(ROOT, thread.digests)[-1], settings, call.agent),
        )
        snapshot = snapshot_due(parent)
        intent = CallIntent(
            **self._named(call),
            gateway="gateway-1-5f0c2a",
            latest_end_ms=1_790_000_000_000 + 3000 * call.number + 660_000,
            scenario=thread.scenario,
            agent=call.agent,
            model="model",
            asked_model="model",
            stream=True,
            extras={"parallel_tool_calls": True},
            params={"temperature": 1.0, "top_p": 0.95, "max_tokens": 8192, "stop": []},
            request_bytes=len(call.prompt),
        )
        intent = as_delta(intent, ModelRequest(messages=call.messages, tools=self._tools), place, snapshot=snapshot)
        self._log(intent)
        parent_ids = parent.ids() if parent is not None and not snapshot else TokenIds()
        prompt = TokenIds(call.prompt)
        same = common_prefix(parent_ids, prompt)
        self._owed[call.call_id] = intent, self._make_end(call, prompt, same), thread.digests[:], settings

    def _make_end(self, call: Call, prompt: TokenIds, same: int) -> CallEnd:
        sampled = TokenIds(call.sampled)
        return CallEnd(
            **(self._named(call) | {"at_ms": 1_790_000_002_000 + 3000 * call.number}),
            status="ok",
            shared_prompt_ids=same,
            prompt_ids=prompt[same:],
            completion_ids=sampled,
            logprobs=Logprobs(call.logprobs),
            logprob_kind="raw",
            reply=call.reply,
            finish_reason="tool_calls" if call.reply.get("tool_calls") else "stop",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled)),
            server="llm-1",
            engine="vllm 0.32.0",
            policy_version=call.number // 40,
            timings=CallTimings(queue_s=0.001, first_token_s=0.21, total_s=1.93),
        )

    def _end(self, call: Call) -> None:
        intent, end, digests, settings = self._owed.pop(call.call_id)
        seq = self._log(end)
        own = digests[intent.shared_messages :]
        self._known.add(intent, end, seq, digests=own, settings=settings)

    # --- what others need of it ---

    def close(self, **changes: Any) -> Commit:
        """Log the rest of the rollout's life and decide that everything counts."""
        same = {"rollout": self._rollout, "attempt": 1}
        closed = self._log(RolloutEvent(kind="ran", at_ms=20, started_ms=10, status="completed", **same))
        evaluated = self._log(RolloutEvent(kind="evaluated", at_ms=30, reward=1.0, **same))
        facts: dict[str, Any] = {
            "run": "bench",
            "task_id": self._rollout.task_id,
            "group_id": self._rollout.task_id,
            "group_size": 1,
            "rollout_id": self._rollout.rollout_id,
            "index": 0,
            "attempt": 1,
            "status": "completed",
            "cut_seq": self._seq,
            "closed_seq": closed,
            "evaluated_seq": evaluated,
        }
        return Commit(**(facts | changes))

    def encoded(self, contents: Contents) -> list[tuple[int, str, bytes]]:
        """Sequence, kind and bytes of each event, large parts taken out, as they stand in the log."""
        return asyncio.run(self._encoded(contents))

    async def _encoded(self, contents: Contents) -> list[tuple[int, str, bytes]]:
        stored = []
        for seq, event in self.events:
            kind = "life" if isinstance(event, RolloutEvent) else "call"
            whole = await contents.take_out(event) if isinstance(event, CallIntent) else event
            stored.append((seq, kind, encode(whole)))
        return stored

    def size(self) -> int:
        """Bytes of all events as msgpack, whole."""
        return sum(len(msgspec.msgpack.encode(event, enc_hook=to_wire)) for _, event in self.events)

    def whole_calls(self) -> list[dict[str, Any]]:
        """The calls with whole prompts and messages, in the order of their replies."""
        return [
            {
                "call_id": call.call_id,
                "parent": call.parent.call_id if call.parent else None,
                "scenario": call.scenario,
                "messages": call.messages,
                "spans": call.spans,
                "tools": self._tools,
                "prompt": call.prompt,
                "sampled": call.sampled,
                "logprobs": call.logprobs,
                "reply": call.reply,
                "ended_s": 1_790_000_002.0 + 3 * call.number,
            }
            for call in self.calls
        ]

    def truth(self, without: tuple[str, ...] = ()) -> list[tuple[bytes, bytes, bytes]]:
        """Ids, mask and logprobs of each sequence, packed, when calls of these scenarios do not count."""
        calls = [call for call in self.calls if call.scenario not in without]
        continued = {call.parent.call_id for call in calls if call.parent}
        return [_sequence(call) for call in calls if call.call_id not in continued]


def _sequence(leaf: Call) -> tuple[bytes, bytes, bytes]:
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    mask, logprobs = bytearray(), bytearray()
    for call in reversed(path):
        new = len(call.prompt) // TokenIds.itemsize - len(mask)
        mask += bytes(new) + b"\1" * (len(call.sampled) // TokenIds.itemsize)
        logprobs += bytes(4 * new) + call.logprobs
    return leaf.prompt + leaf.sampled, bytes(mask), bytes(logprobs)
