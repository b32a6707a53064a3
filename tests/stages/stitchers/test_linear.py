"""Work and memory grow with the bytes of a session, not with the length of its prompts. Counted, never timed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from rollyard.pipeline.codec import encode
from rollyard.schemas.call import AgentIds, CallEnd, CallEvent, CallIntent, Message
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit
from rollyard.stages.stitching import STITCHER_VERSION, outcome_of

ROLLOUT = Rollout.of("run", "task", 0, 1)
NEW_IDS = 120
SAMPLED_IDS = 40


@dataclass
class Log:
    """A session as a gateway logs it: each record holds what its parent's does not."""

    events: list[tuple[int, CallEvent | RolloutEvent]] = field(default_factory=list)
    next_id: int = 1
    calls: int = 0

    def ids(self, count: int) -> TokenIds:
        self.next_id += count
        return TokenIds.of(range(self.next_id - count, self.next_id))

    def add(self, event: CallEvent | RolloutEvent) -> int:
        self.events.append((len(self.events) + 1, event))
        return len(self.events)

    def ask(
        self,
        messages: list[Message],
        parent: str | None,
        *,
        shared: tuple[int, int] = (0, 0),
        prompt: TokenIds | None = None,
        **fields: Any,
    ) -> str:
        """One call; `shared` are the messages and the ids that its parent's record holds."""
        self.calls += 1
        call_id = f"call{self.calls}"
        named: dict[str, Any] = {"call_id": call_id, "run": "run", "rollout_id": ROLLOUT.rollout_id, "attempt": 1}
        self.add(
            CallIntent(
                **named,
                gateway="g",
                at_ms=0,
                latest_end_ms=1,
                parent=parent,
                shared_messages=shared[0],
                messages=messages,
                **fields,
            )
        )
        call = {
            "id": f"id{self.calls}",
            "type": "function",
            "function": {"name": "task", "arguments": f'{{"prompt": "{work(self.calls)}"}}'},
        }
        self.add(
            CallEnd(
                **named,
                at_ms=1,
                status="ok",
                shared_prompt_ids=shared[1],
                prompt_ids=self.ids(NEW_IDS) if prompt is None else prompt,
                completion_ids=self.ids(SAMPLED_IDS),
                logprobs=Logprobs.of([-0.5] * SAMPLED_IDS),
                reply={"role": "assistant", "content": f"reply {self.calls}", "tool_calls": [call]},
                finish_reason="stop",
            )
        )
        return call_id

    def commit(self) -> Commit:
        closed = self.add(RolloutEvent(kind="ran", rollout=ROLLOUT, attempt=1, at_ms=2, status="completed"))
        return Commit(
            run="run",
            task_id="task",
            group_id="task",
            group_size=1,
            rollout_id=ROLLOUT.rollout_id,
            index=0,
            attempt=1,
            status="completed",
            cut_seq=closed,
            closed_seq=closed,
            stitcher=STITCHER_VERSION,
        )

    def size(self) -> int:
        """Bytes of the records; none is compressed, so that the sizes can be compared."""
        return sum(len(encode(event)) for _, event in self.events)


@dataclass
class Thread:
    """A conversation that only grows; `new` are the messages of its next request that no record holds."""

    log: Log
    new: list[Message]
    last: str | None = None
    shared: tuple[int, int] = (0, 0)
    turns: int = 0

    def ask(self, **fields: Any) -> None:
        self.last = self.log.ask(self.new, self.last, shared=self.shared, **fields)
        self.shared = (self.shared[0] + len(self.new) + 1, self.shared[1] + NEW_IDS + SAMPLED_IDS)
        self.new = [result(self.log.calls)]
        self.turns += 1


def work(number: int) -> str:
    """What a call of the main agent gives to a sub-agent."""
    return f"Look at file {number}."


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"id{number}", "content": f"result {number} " * 20}


def conversation(turns: int) -> Log:
    """A main agent with two sub-agents between its turns, each of a tenth of them, and a compaction."""
    log = Log()
    main = Thread(log, [{"role": "system", "content": "You work."}, user("Begin.")])
    running: list[Thread] = []
    for turn in range(turns):
        if turn == turns // 2:
            log.ask([result(log.calls), user("Sum up.")], main.last, shared=main.shared, scenario="compaction")
            main = Thread(log, [user("The summary.")])
        main.ask()
        for thread in running:
            thread.ask(scenario="sub_agent", agent=AgentIds(thread="sub", parent_thread="main"))
        running = [thread for thread in running if thread.turns < turns // 10]
        if turn in (turns // 5, turns // 3):
            running.append(Thread(log, [user(work(log.calls))]))
    return log


def rewritten(turns: int) -> Log:
    """An agent that changes its first message before every tenth turn, so that the whole request is logged anew."""
    log = Log()
    parent: str | None = None
    history: list[Message] = [user("Begin.")]
    shared = (0, 0)
    for turn in range(turns):
        drift = None
        if turn % 10 == 9:
            history = [user(f"Begin {turn}."), *history[1:]]
            shared, drift = (0, 0), "history_edited"
        prompt = log.ids(NEW_IDS if shared[0] else turn * (NEW_IDS + SAMPLED_IDS) + NEW_IDS)
        parent = log.ask(history[shared[0] :], parent, shared=shared, prompt=prompt, drift=drift)
        end = log.events[-1][1]
        assert isinstance(end, CallEnd) and end.reply is not None
        history = [*history, end.reply]
        shared = (len(history), shared[1] + len(prompt) + SAMPLED_IDS)
        history = [*history, result(log.calls)]
    return log


def instructions(log: Log) -> float:
    """Bytecode instructions that run for each byte of the session."""
    count = 0

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return step

    commit, before = log.commit(), sys.gettrace()
    sys.settrace(step)
    try:
        outcome = outcome_of(log.events, commit)
    finally:
        sys.settrace(before)
    assert outcome.samples
    assert count
    return count / log.size()


def peak(log: Log) -> float:
    """Bytes that are allocated at once for each byte of the session."""
    commit = log.commit()
    outcome_of(log.events, commit)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        outcome = outcome_of(log.events, commit)
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert outcome.samples
    return most / log.size()


@pytest.mark.parametrize("measure", [instructions, peak])
@pytest.mark.parametrize(("play", "lengths"), [(conversation, (50, 200, 800)), (rewritten, (50, 100, 200))])
def test_a_longer_session_costs_no_more_for_each_of_its_bytes(
    play: Callable[[int], Log], lengths: Sequence[int], measure: Callable[[Log], float]
) -> None:
    short, *longer = [measure(play(turns)) for turns in lengths]
    assert max(longer) <= 1.2 * short
