"""What a rollout's commit, its events and its samples make together: the delivery. Pure."""

from __future__ import annotations

from rollyard.pipeline.log import Events, LogEvent
from rollyard.schemas.call import CallIntent
from rollyard.schemas.rollout import RolloutEvent
from rollyard.schemas.sample import Commit, Delivery
from rollyard.stages.stitchers.outcome import Outcome


def delivery_of(commit: Commit, outcome: Outcome, events: Events) -> Delivery:
    """The delivery of a rollout. Of its events those up to the cut count."""
    counted = {seq: event for seq, event in events if seq <= commit.cut_seq}
    evaluated, ran = (_life(counted.get(seq)) for seq in (commit.evaluated_seq, commit.closed_seq))
    calls = {
        event.call_id for event in counted.values() if isinstance(event, CallIntent) and event.attempt == commit.attempt
    }
    return Delivery(
        run=commit.run,
        task_id=commit.task_id,
        group_id=commit.group_id,
        group_size=commit.group_size,
        rollout_id=commit.rollout_id,
        index=commit.index,
        attempt=commit.attempt,
        status=commit.status,
        failure=commit.failure,
        reward=evaluated.reward if evaluated else None,
        metrics=evaluated.metrics if evaluated else {},
        rewards=evaluated.rewards if evaluated else {},
        agent_metrics=ran.result.metrics if ran and ran.result else {},
        answer=ran.result.answer if ran and ran.result else "",
        calls=len(calls),
        excluded=dict(outcome.excluded),
        drift=dict(outcome.drift),
        lenience=dict(outcome.lenience),
        samples=outcome.samples,
        metadata=commit.metadata,
    )


def _life(event: LogEvent | None) -> RolloutEvent | None:
    return event if isinstance(event, RolloutEvent) else None
