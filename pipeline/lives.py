"""The lives of rollouts: where they stand, what each stage did, how they ended, and what people need to know why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.failure import Failure, Status
from rollyard.schemas.rollout import Position, RolloutEvent, RolloutState
from rollyard.schemas.sample import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where one rollout stands, or how it ended, in short."""

    task_id: str
    index: int
    rollout_id: str
    position: Position
    attempt: int
    status: Status | None
    reward: float | None
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Life:
    """One rollout: its state now, its events in the order of the log, and its commit once it ended."""

    state: RolloutState
    events: tuple[RolloutEvent, ...]
    commit: Commit | None


async def states(bus: Bus, run: str, prefix: str = "") -> AsyncIterator[RolloutState]:
    """The states of the rollouts of `run` whose id begins with `prefix`."""
    bucket = Bucket[RolloutState](bus, subjects.ROLLOUTS, RolloutState)
    async for _, state, _ in bucket.items(subjects.rollout_key(run, "*")):
        if state.rollout.rollout_id.startswith(prefix):
            yield state


async def summaries(bus: Bus, run: str, prefix: str = "") -> list[Summary]:
    """The rollouts of `run` whose id begins with `prefix`, by task and index. Reads the run's log without its calls."""
    found = [state async for state in states(bus, run, prefix)]
    rewards: dict[int, float | None] = {}
    async for stored in bus.read(subjects.LOG, subjects.log_subject(run, "*", "life")):
        event: RolloutEvent = decode(stored.data, RolloutEvent)
        if event.kind == "evaluated":
            rewards[stored.seq] = event.reward
    commits = {}
    async for stored in bus.read(subjects.LOG, subjects.log_subject(run, "*", "commit")):
        commit: Commit = decode(stored.data, Commit)
        commits[commit.rollout_id] = (rewards.get(commit.evaluated_seq), commit.failure)
    made = []
    for state in found:
        reward, failure = commits.get(state.rollout.rollout_id, (None, state.failure))
        made.append(
            Summary(
                task_id=state.rollout.task_id,
                index=state.rollout.index,
                rollout_id=state.rollout.rollout_id,
                position=state.position,
                attempt=state.attempt,
                status=state.status,
                reward=reward,
                failure=failure,
            )
        )
    return sorted(made, key=lambda summary: (summary.task_id, summary.index))


async def life(bus: Bus, state: RolloutState) -> Life:
    """All that the log tells of the rollout of `state`, without its calls."""
    run, rollout_id = state.rollout.run, state.rollout.rollout_id
    events: list[RolloutEvent] = [
        decode(stored.data, RolloutEvent)
        async for stored in bus.read(subjects.LOG, subjects.log_subject(run, rollout_id, "life"))
    ]
    last = await bus.last(subjects.log_subject(run, rollout_id, "commit"))
    return Life(state, tuple(events), decode(last.data, Commit) if last is not None else None)
