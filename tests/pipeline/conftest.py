"""A run as stages and gateways leave it on the bus: events with blobs, commits with digests, states and tasks."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.log import read_rollout
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallIntent, Usage
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Run
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.rollout import Position, Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sample import Commit, SampleDigest
from rollyard.schemas.task import TaskProgress
from rollyard.stages.stitching import STITCHER_VERSION, samples_of

SHARED = "a system prompt that every run has " * 100


@dataclass
class RecordedRun:
    """One run, and the names of its blobs: the system prompt that every run shares, its own tools, its own image."""

    bus: Bus
    run: str = "r"
    rollouts: list[Rollout] = field(default_factory=list)
    shared: str = ""
    own: str = ""
    image: str = ""

    async def record(self, count: int, *, large: int = -1) -> list[Commit]:
        """Log `count` more rollouts, one after the other, each ended; in that number `large` one reply is huge."""
        return [await self.rollout(large=index == large) for index in range(count)]

    async def rollout(self, *, large: bool = False, position: Position = "ended") -> Commit:
        """A rollout whose first attempt failed and whose second one had two calls, and what became of it."""
        rollout = Rollout.of(self.run, "task", len(self.rollouts), 64)
        self.rollouts.append(rollout)
        await self._call(rollout, 1, "lost", None, [])
        await self.life(rollout, 1, kind="failed", failure=Failure.of("infra", "the place died"))
        huge = random.Random(rollout.rollout_id).randbytes(600_000).hex()
        first = await self._call(rollout, 2, "first", None, [1, 2, 3])
        await self._call(rollout, 2, "second", first, [4, 5, 6], reply=huge if large else "fine")
        closed = await self.life(rollout, 2, kind="ran", status="completed")
        evaluated = await self.life(rollout, 2, kind="evaluated", reward=1.0)
        commit = await self._commit(rollout, closed, evaluated)
        state = RolloutState(rollout=rollout, position=position, attempt=2, status="completed")
        states: Bucket[RolloutState] = Bucket(self.bus, subjects.ROLLOUTS, RolloutState)
        await states.put(subjects.rollout_key(self.run, rollout.rollout_id), state)
        return commit

    async def _call(
        self, rollout: Rollout, attempt: int, name: str, parent: str | None, ids: list[int], *, reply: str = "fine"
    ) -> str:
        who: dict[str, Any] = {
            "call_id": f"{name}{rollout.index}",
            "run": self.run,
            "rollout_id": rollout.rollout_id,
            "attempt": attempt,
        }
        picture = base64.b64encode(hashlib.sha256(self.run.encode()).digest() * 64).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        system = {"role": "system", "content": SHARED}
        intent = CallIntent(
            **who,
            gateway="g",
            at_ms=1,
            latest_end_ms=2,
            parent=parent,
            shared_messages=4 if parent else 0,
            messages=([] if parent else [system, {"role": "user", "content": [image]}])
            + [{"role": "user", "content": f"{name}?"}],
            tools=None if parent else [{"name": "shell", "description": f"of {self.run} " * 500}],
            model="m",
        )
        taken = await self.bus.contents.take_out(intent)
        if taken.contents:
            self.shared, self.own = taken.contents["0"], taken.contents["tools"]
            self.image = taken.messages[1]["content"][0]["image_url"]["url"].removeprefix("blob:")
        subject = subjects.log_subject(self.run, rollout.rollout_id, "call")
        await self.bus.publish(subject, encode(taken))
        if ids:
            end = CallEnd(
                **who,
                at_ms=3,
                status="ok",
                shared_prompt_ids=6 if parent else 0,
                prompt_ids=TokenIds.of(ids),
                completion_ids=TokenIds.of([10, 11, 12]),
                logprobs=Logprobs.of([-1, -2, -3]),
                logprob_kind="raw",
                reply={"role": "assistant", "content": reply},
                finish_reason="stop",
                usage=Usage(prompt_tokens=6, completion_tokens=3),
                policy_version=7,
            )
            await self.bus.publish(subject, encode(end))
        return who["call_id"]

    async def life(self, rollout: Rollout, attempt: int, **fields: Any) -> int:
        event = RolloutEvent(rollout=rollout, attempt=attempt, at_ms=4, **fields)
        return await self.bus.publish(subjects.log_subject(self.run, rollout.rollout_id, "life"), encode(event))

    async def _commit(self, rollout: Rollout, closed: int, evaluated: int) -> Commit:
        facts: dict[str, Any] = {
            "run": self.run,
            "task_id": "task",
            "group_id": "task",
            "group_size": 64,
            "rollout_id": rollout.rollout_id,
            "index": rollout.index,
            "attempt": 2,
            "status": "completed",
            "cut_seq": evaluated,
            "closed_seq": closed,
            "evaluated_seq": evaluated,
            "stitcher": STITCHER_VERSION,
        }
        events = await read_rollout(self.bus, self.run, rollout.rollout_id)
        samples = samples_of(events, Commit(**facts))
        assert samples
        digests = tuple(SampleDigest(sample_id=each.sample_id, digest=sample_digest(each)) for each in samples)
        commit = Commit(**facts, samples=digests)
        await self.bus.create(subjects.log_subject(self.run, rollout.rollout_id, "commit"), encode(commit))
        return commit

    async def close(self, progress: str = "closed") -> None:
        """The entries of the run and of its one task."""
        await Bucket[Run](self.bus, subjects.RUNS, Run).put(subjects.token(self.run), Run(run=self.run))
        task = TaskProgress(content_hash="h", group_size=64, progress=progress, task_id="task", run=self.run)
        tasks: Bucket[TaskProgress] = Bucket(self.bus, subjects.TASK_BUCKET, TaskProgress)
        await tasks.put(subjects.task_key(self.run, "task"), task)

    async def logged(self) -> list[Stored]:
        """What the log holds of the run."""
        return [stored async for stored in self.bus.read(subjects.LOG, subjects.log_subject(self.run, "*", "*"))]


@pytest.fixture
def recorded(bus: Bus) -> Callable[..., RecordedRun]:
    """Makes runs."""
    return lambda run="r": RecordedRun(bus, run)
