"""Every record that crosses a process boundary, by name, and its JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec

from rollyard.schemas import alarm, call, failure, fleet, packed, policy, rollout, sample, task, weights
from rollyard.schemas.errors import ConfigError

RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        task.Task,
        task.TaskProgress,
        policy.SamplePolicy,
        rollout.Rollout,
        rollout.RolloutState,
        rollout.StageMessage,
        rollout.RolloutEvent,
        call.CallIntent,
        call.CallEnd,
        call.CallRecord,
        sample.Sample,
        sample.Commit,
        sample.Delivery,
        sample.Group,
        failure.Failure,
        alarm.Alarm,
        fleet.Lease,
        fleet.LlmServer,
        fleet.PolicyVersion,
        fleet.Cancel,
        fleet.ClosedSession,
        fleet.DeadLetter,
        fleet.Run,
        weights.WeightUpdate,
        weights.WeightProgress,
        weights.WeightReport,
        weights.PoolView,
    )
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a record. Raises ConfigError for a name that is not in the catalogue."""
    if name not in RECORDS:
        raise ConfigError(f"no record is called {name!r}", hint=f"choose one of {', '.join(sorted(RECORDS))}")
    return msgspec.json.schema(RECORDS[name], schema_hook=packed.json_schema)
