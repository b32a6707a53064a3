"""Which sample policy is in effect for a rollout: its task's own, else that of its run."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas import subjects
from rollyard.schemas.errors import BlobError, DecodeError, TaskError
from rollyard.schemas.failure import Status
from rollyard.schemas.fleet import Run
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.rollout import RolloutState

log = structlog.get_logger(__name__)

CACHED_RUNS: Final = 256


class Policies:
    """Reads policies from the buckets. That of a run never changes, so it is read once."""

    def __init__(self, bus: Bus, tasks: TaskStore) -> None:
        self._tasks = tasks
        self._runs: Bucket[Run] = Bucket(bus, subjects.RUNS, Run)
        self._known: OrderedDict[str, SamplePolicy] = OrderedDict()

    async def policy_of(self, state: RolloutState) -> SamplePolicy:
        """The policy of a rollout. Raises BusError, and TaskError, DecodeError or BlobError for an unreadable task.

        A task that cannot be read must not keep the rollout that failed for it from its end: then the run's counts.
        """
        rollout = state.rollout
        try:
            own = (await self._tasks.get(rollout.run, rollout.task_id)).samples
        except (TaskError, DecodeError, BlobError) as error:
            if state.status not in ("failed", "cancelled"):
                raise
            log.error("policy_of_the_task_not_read", rollout=rollout.rollout_id, error=str(error))
            own = None
        return own if own is not None else await self._of_run(rollout.run)

    async def _of_run(self, run: str) -> SamplePolicy:
        if run not in self._known:
            found = await self._runs.get(subjects.token(run))
            if found is None:
                return SamplePolicy()
            self._known[run] = found[0].samples
            if len(self._known) > CACHED_RUNS:
                self._known.popitem(last=False)
        return self._known[run]


def may_have_samples(status: Status | None, policy: SamplePolicy) -> bool:
    """Whether samples can come of a rollout that ended so."""
    return status != "cancelled" and (status != "failed" or policy.failed != "drop")
