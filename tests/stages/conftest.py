"""A synthetic agent: sessions with turns, forks, retries and failures, logged as a gateway would, and their truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.digest import sample_digest
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit, SampleDigest
from rollyard.stages.stitching import samples_of

ROLLOUT = Rollout.of("run", "task", 0, 1)
MOVES = ("turn", "turn", "turn", "fork", "root", "retry", "error", "aborted", "superseded", "lost", "untrainable")


@dataclass
class Call:
    """What the agent and the model really did; `parent` is the call whose ids the prompt continues."""

    call_id: str
    parent: Call | None
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    version: int
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    outcome: str = "ok"
    dead: bool = False

    @property
    def counted(self) -> bool:
        return self.outcome == "ok" and not self.dead

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.sampled


@dataclass
class Session:
    """A log of one attempt and the truth behind it. `unique` ids never repeat, so that nothing matches by chance."""

    rng: random.Random
    unique: bool = True
    attempt: int = 1
    rollout: Rollout = ROLLOUT
    events: list[tuple[int, CallEvent | RolloutEvent]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    seq: int = 0
    next_id: int = 100
    owed: dict[str, CallEnd] = field(default_factory=dict)

    def log(self, event: CallEvent | RolloutEvent) -> int:
        self.seq += self.rng.randint(1, 3)
        self.events.append((self.seq, event))
        return self.seq

    def some_ids(self) -> list[int]:
        count = self.rng.randint(1, 5)
        if not self.unique:
            return [self.rng.randint(0, 2) for _ in range(count)]
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def ask(
        self,
        parent: Call | None,
        outcome: str = "ok",
        *,
        again: Call | None = None,
        sampled: list[int] | None = None,
        hold: bool = False,
    ) -> Call:
        """One call: a continuation of `parent`, a new conversation, or the request of `again` once more.

        `hold`: its end is not logged before `settle`.
        """
        if parent is not None:
            self.settle(parent)
        number = len(self.calls)
        sampled = sampled or self.some_ids()
        if again is not None:
            prompt, messages = again.prompt, again.messages
        else:
            history = [*parent.messages, parent.reply] if parent else []
            prompt = (parent.ids if parent else []) + self.some_ids()
            messages = [*history, {"role": "user", "content": f"question {number}"}]
        call = Call(
            call_id=f"c{number}",
            parent=parent,
            prompt=prompt,
            sampled=sampled,
            logprobs=[-self.rng.randint(1, 64) / 8 for _ in sampled],
            version=self.rng.randint(0, 3),
            messages=messages,
            reply={"role": "assistant", "content": f"answer {number}"},
            outcome=outcome,
        )
        self.calls.append(call)
        self._log_call(call, hold)
        return call

    def _log_call(self, call: Call, hold: bool) -> None:
        named = {"call_id": call.call_id, "run": "run", "rollout_id": self.rollout.rollout_id, "attempt": self.attempt}
        as_delta = call.parent is not None and self.rng.random() < 0.8
        shared_messages = len(call.parent.messages) + 1 if as_delta and call.parent else 0
        shared_ids = len(call.parent.ids) if as_delta and call.parent else 0
        self.log(
            CallIntent(
                **named,
                gateway="g",
                at_ms=self.seq,
                latest_end_ms=self.seq + 1000,
                parent=call.parent.call_id if call.parent else None,
                shared_messages=shared_messages,
                messages=call.messages[shared_messages:],
                tools=None if as_delta else [{"name": "shell"}],
                params={"temperature": 1.0},
                model="m",
            )
        )
        if call.outcome == "lost":
            return
        self.owed[call.call_id] = CallEnd(
            **named,
            at_ms=self.seq,
            status="ok" if call.outcome == "untrainable" else call.outcome,
            untrainable="no logprobs" if call.outcome == "untrainable" else None,
            shared_prompt_ids=shared_ids,
            prompt_ids=TokenIds.of(call.prompt[shared_ids:]),
            completion_ids=TokenIds.of(call.sampled),
            logprobs=Logprobs.of(call.logprobs),
            logprob_kind="raw",
            reply=call.reply,
            finish_reason="stop",
            policy_version=call.version,
        )
        # Concurrent calls end in another order than they began.
        if not hold and self.rng.random() < 0.8:
            self.settle(call)

    def settle(self, call: Call) -> None:
        if call.call_id in self.owed:
            self.log(self.owed.pop(call.call_id))

    def play(self, turns: int, moves: tuple[str, ...] = MOVES) -> Session:
        """Random moves of an agent; the first is a new conversation."""
        for _ in range(turns):
            held = [call for call in self.calls if call.counted]
            move = self.rng.choice(moves) if held else "root"
            if move == "turn":
                self.ask(held[-1])
            elif move == "fork":
                self.ask(self.rng.choice(held))
            elif move == "root":
                self.ask(None)
            elif move == "retry":
                first = self.ask(held[-1])
                self.settle(first)
                first.dead = True
                self.ask(held[-1], again=first)
            else:
                self.ask(held[-1], outcome=move)
        for call_id in list(self.owed):
            self.log(self.owed.pop(call_id))
        return self

    def close(self, reward: float | None = 1.0, **changes: Any) -> Commit:
        """Log the rest of a rollout's life and decide that everything counts."""
        same = {"rollout": self.rollout, "attempt": self.attempt}
        self.log(RolloutEvent(kind="initialized", at_ms=5, **same))
        closed = self.log(RolloutEvent(kind="ran", at_ms=20, started_ms=10, status="completed", **same))
        evaluated = self.log(RolloutEvent(kind="evaluated", at_ms=30, reward=reward, **same))
        facts: dict[str, Any] = {
            "run": "run",
            "task_id": "task",
            "group_id": "task",
            "group_size": self.rollout.group_size,
            "rollout_id": self.rollout.rollout_id,
            "index": self.rollout.index,
            "attempt": self.attempt,
            "status": "completed",
            "cut_seq": self.seq,
            "closed_seq": closed,
            "evaluated_seq": evaluated,
            "metadata": {"b": 1, "a": 2},
        }
        return Commit(**(facts | changes))

    def walks(self) -> list[list[str]]:
        """The chains of counted calls, by ids, from root to leaf, in the order of their calls."""
        counted = [call for call in self.calls if call.counted]
        parents = {call.parent.call_id for call in counted if call.parent}
        chains = []
        for call in counted:
            if call.call_id not in parents:
                chain: list[Call] = []
                at: Call | None = call
                while at:
                    chain.append(at)
                    at = at.parent
                chains.append([each.call_id for each in reversed(chain)])
        return sorted(chains, key=lambda chain: [int(call_id[1:]) for call_id in chain])


@pytest.fixture(scope="session")
def new_session() -> type[Session]:
    """Makes synthetic sessions."""
    return Session


class LogSession(Protocol):
    """What the fixture of that name is."""

    async def __call__(self, session: Session, commit: Commit, change: Callable[[Any], Any] = ...) -> Commit: ...


@pytest.fixture
def log_session(bus: Bus) -> LogSession:
    """Publishes the events of a session and its commit to the LOG; what `change` makes of an event is what it holds.

    The commit names the sequences of the LOG, and the digests of the samples that the unchanged events give.
    """

    async def log(session: Session, commit: Commit, change: Callable[[Any], Any] = lambda event: event) -> Commit:
        run, rollout_id = commit.run, commit.rollout_id
        stored: list[tuple[int, Any]] = []
        seqs = {0: 0}
        for old_seq, event in session.events:
            kind = "life" if isinstance(event, RolloutEvent) else "call"
            data = encode(change(event))
            seqs[old_seq] = await bus.publish(subjects.log_subject(run, rollout_id, kind), data)
            stored.append((seqs[old_seq], event))
        named = {name: seqs[getattr(commit, name)] for name in ("cut_seq", "closed_seq", "evaluated_seq")}
        commit = structs.replace(commit, **named)
        digests = [
            SampleDigest(sample_id=sample.sample_id, digest=sample_digest(sample))
            for sample in samples_of(stored, commit)
        ]
        commit = structs.replace(commit, samples=tuple(digests))
        await bus.create(subjects.log_subject(run, rollout_id, "commit"), encode(commit))
        return commit

    return log
