"""How far a run is: a snapshot taken from the streams and buckets, and its rendering for people."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated, Final

from msgspec import Meta, Struct

from rollyard.pipeline.alarms import kinds_raised
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pools import unserved
from rollyard.schemas import subjects
from rollyard.schemas.alarm import NO_WORKER
from rollyard.schemas.fleet import LlmServer, PolicyVersion
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.task import TaskProgress

BAR_MAX_COLUMNS: Final = 40
STAGE_NAMES: Final = ("init", "run", "eval", "aggregate")


class RunStatus(Struct, frozen=True, kw_only=True):
    """A snapshot of a run. Its parts are read one after the other, so they may be some milliseconds apart."""

    run: str
    at_ms: Annotated[int, Meta(description="when it was taken, Unix ms")]
    tasks: Annotated[int, Meta(description="accepted tasks")] = 0
    tasks_waiting: Annotated[int, Meta(description="published tasks that are not admitted yet")] = 0
    tasks_closed: Annotated[int, Meta(description="tasks whose rollouts are all delivered")] = 0
    rollouts: Annotated[int, Meta(description="rollouts of the accepted tasks")] = 0
    stages: Annotated[dict[str, int], Meta(description="rollouts waiting for a stage or in it, by stage")] = {}
    delivered: Annotated[int, Meta(description="rollouts delivered")] = 0
    groups: Annotated[int, Meta(description="complete groups")] = 0
    ended: Annotated[dict[str, int] | None, Meta(description="ended rollouts by status; null: not asked for")] = None
    dead: Annotated[int, Meta(description="messages put aside in DEAD")] = 0
    alarms: Annotated[tuple[str, ...], Meta(description="kinds of alarms that it raised")] = ()
    no_worker: Annotated[
        dict[str, int],
        Meta(description="rollouts waiting for a sandbox backend that no living worker offers, by backend"),
    ] = {}
    policy_version: Annotated[int | None, Meta(description="newest that the trainer announced; null: none")] = None
    tokens: Annotated[int | None, Meta(description="tokens sampled so far; null: not known")] = None
    model_servers: Annotated[int | None, Meta(description="model servers in the pool; null: not known")] = None


async def run_status(bus: Bus, run: str, *, statuses: bool = True, tokens: int | None = None) -> RunStatus:
    """Take a snapshot. `statuses=False` leaves out `ended`, the one part that reads a record of every rollout.

    `tokens` is passed through, for callers who count them. Raises BusError.
    """
    name = subjects.token(run)
    stages = dict.fromkeys(STAGE_NAMES, 0)
    for subject_filter in (f"stage.*.*.{name}", subjects.stage_subject("aggregate", None, run)):
        for subject, count in (await bus.subjects(subjects.STAGES, subject_filter)).items():
            stage = subject.split(".")[1]
            stages[stage] = stages.get(stage, 0) + count
    tasks = closed = rollouts = 0
    async for _, task, _ in Bucket[TaskProgress](bus, subjects.TASK_BUCKET, TaskProgress).items(f"{name}.*"):
        tasks += 1
        closed += task.progress == "closed"
        rollouts += task.group_size
    policy = await Bucket[PolicyVersion](bus, subjects.POLICY, PolicyVersion).get(name)
    return RunStatus(
        run=run,
        at_ms=time.time_ns() // 1_000_000,
        tasks=tasks,
        tasks_waiting=await _count(bus, subjects.TASKS, subjects.task_subject(run)),
        tasks_closed=closed,
        rollouts=rollouts,
        stages=stages,
        delivered=await _count(bus, subjects.SAMPLES, f"sample.{name}.*.*"),
        groups=await _count(bus, subjects.SAMPLES, f"group.{name}.*"),
        ended=await _ended(bus, name) if statuses else None,
        dead=await _count(bus, subjects.DEAD, f"dead.*.{name}"),
        alarms=await kinds_raised(bus, run),
        no_worker=await unserved(bus, run) if stages["init"] else {},
        policy_version=policy[0].version if policy else None,
        tokens=tokens,
        model_servers=len([key async for key, _, _ in Bucket[LlmServer](bus, subjects.LLM_SERVERS, LlmServer).items()]),
    )


async def _count(bus: Bus, stream: str, subject_filter: str) -> int:
    return sum((await bus.subjects(stream, subject_filter)).values())


async def _ended(bus: Bus, name: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    async for _, state, _ in Bucket[RolloutState](bus, subjects.ROLLOUTS, RolloutState).items(f"{name}.*"):
        if state.position == "ended" and state.status is not None:
            counts[state.status] += 1
    return dict(counts)


def render_status(status: RunStatus, previous: RunStatus | None, elapsed_s: float, width: int | None) -> str:
    """A block of lines for a terminal of `width` columns, or with `width=None` one plain line.

    Rates are those between `previous` and `status`, which are `elapsed_s` apart.
    """
    rate = _rate(status.delivered, previous.delivered if previous else None, elapsed_s)
    tokens = _rate(status.tokens, previous.tokens if previous else None, elapsed_s)
    speed = [
        f"{rate:.1f} rollouts/s" if rate is not None else "",
        f"{tokens:.0f} tokens/s" if tokens is not None else "",
    ]
    speed = [part for part in speed if part] + [_time_left(status, rate)]
    done = f"{status.delivered}/{status.rollouts}{'+' if status.tasks_waiting else ''} rollouts"
    groups = f"{status.groups}/{status.tasks} groups"
    stages = [f"{stage} {count}" for stage, count in status.stages.items()]
    ends = [f"{status.ended[key]} {key}" for key in sorted(status.ended)] if status.ended else []
    ends += [f"{status.dead} in DEAD"] if status.dead else []
    ends += [
        f"waiting for a worker with the backend {pool}: {count}" for pool, count in sorted(status.no_worker.items())
    ]
    # That a worker is missing is said by the line above for as long as it is so; the alarm stays.
    ends += [f"ALARM {kind}: see `rollyard alarms`" for kind in status.alarms if kind != NO_WORKER or status.no_worker]
    if status.model_servers == 0 and status.stages.get("run"):
        ends.append("no model server is registered: see `rollyard llm add`")
    waiting = [f"admit {status.tasks_waiting}"] if status.tasks_waiting else []
    if width is None:
        parts = [f"{done}, {groups}", ", ".join(waiting + stages), ", ".join(speed), ", ".join(ends)]
        return f"{status.run}: " + "; ".join(part for part in parts if part)
    share = min(1.0, status.delivered / status.rollouts) if status.rollouts else 0.0
    room = max(0, min(BAR_MAX_COLUMNS, width - len("[] 100%")))
    filled = int(share * room)
    lines = [
        f"{status.run}  {done}  {groups}",
        f"[{'#' * filled}{'.' * (room - filled)}] {share:4.0%}",
        "  ".join(waiting + stages),
        "  ".join(speed),
        "  ".join(ends),
    ]
    return "\n".join(line[:width] for line in lines if line)


def _rate(now: int | None, before: int | None, elapsed_s: float) -> float | None:
    if now is None or before is None or elapsed_s <= 0:
        return None
    return max(0, now - before) / elapsed_s


def _time_left(status: RunStatus, rate: float | None) -> str:
    left = status.rollouts - status.delivered
    if left <= 0 and not status.tasks_waiting:
        return "all delivered" if status.rollouts else "nothing to do yet"
    if not rate:
        return "time left not known"
    seconds = round(left / rate)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
