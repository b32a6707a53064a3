"""What a commit lets in of a rollout's events, and what becomes of it: shared by all versions of the stitcher. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.rollout import RolloutEvent
from rollyard.schemas.sample import Commit, Sample, Timings
from rollyard.stages.calls import Event


@dataclass(frozen=True, slots=True)
class Outcome:
    """The samples of a rollout, and what was left out of them, broke a chain or was matched leniently, counted."""

    samples: tuple[Sample, ...] = ()
    excluded: Mapping[str, int] = field(default_factory=dict)
    drift: Mapping[str, int] = field(default_factory=dict)
    lenience: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The events of a rollout that count: the calls of its attempt up to the cut and the close, and its evaluation."""

    calls: list[tuple[int, CallEvent]]
    reward: float | None
    turn_rewards: tuple[float | None, ...]
    timings: Timings


def counted(events: Iterable[tuple[int, Event]], commit: Commit) -> Counted:
    """What `commit` lets in. Nothing is left of calls that began after the close, nor of the ends of lost ones."""
    lost = frozenset(commit.lost_calls)
    closed = commit.closed_seq or commit.cut_seq + 1
    calls: list[tuple[int, CallEvent]] = []
    life: list[tuple[int, RolloutEvent]] = []
    late: set[str] = set()
    in_time: set[str] = set()
    for seq, event in events:
        if seq > commit.cut_seq or event.attempt != commit.attempt:
            continue
        if isinstance(event, CallIntent):
            (in_time if seq < closed else late).add(event.call_id)
            calls.append((seq, event))
        elif isinstance(event, CallEnd):
            if event.call_id not in lost:
                calls.append((seq, event))
        elif isinstance(event, RolloutEvent):
            life.append((seq, event))
    late -= in_time
    if late:
        calls = [(seq, event) for seq, event in calls if event.call_id not in late]
    evaluation = next((event for seq, event in life if seq == commit.evaluated_seq), None)
    return Counted(
        calls=calls,
        reward=evaluation.reward if evaluation else None,
        turn_rewards=evaluation.turn_rewards if evaluation else (),
        timings=_timings(life, commit, evaluation),
    )


def _timings(life: Sequence[tuple[int, RolloutEvent]], commit: Commit, evaluation: RolloutEvent | None) -> Timings:
    ordered = sorted(life, key=lambda item: item[0])
    initialized = next((event for _, event in ordered if event.kind == "initialized"), None)
    runs = {seq: event for seq, event in ordered if event.kind == "ran"}
    # The event that closed the session is the run that counts; another worker may have logged one of its own.
    ran = runs.get(commit.closed_seq) or next(iter(runs.values()), None)
    return Timings(
        initialized_ms=initialized.at_ms if initialized else 0,
        run_started_ms=ran.started_ms if ran else 0,
        run_ended_ms=ran.at_ms if ran else 0,
        evaluated_ms=evaluation.at_ms if evaluation else 0,
    )
