"""A group closes when each of its rollouts has its delivery. Whoever sees that announces it, once."""

from __future__ import annotations

import structlog
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import Conflict
from rollyard.schemas.sample import Group
from rollyard.schemas.task import TaskProgress

log = structlog.get_logger(__name__)


class GroupCloser:
    """Closes groups, each by one of the rollouts that end together in this process."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._closing: set[tuple[str, str]] = set()

    async def close_if_complete(self, run: str, task_id: str, group_size: int) -> None:
        """See `close_if_complete`; does nothing while another call for the same group is at it."""
        group = (run, task_id)
        if not await is_complete(self._bus, run, task_id, group_size) or group in self._closing:
            return
        self._closing.add(group)
        try:
            await close(self._bus, run, task_id, group_size)
        finally:
            self._closing.discard(group)


async def is_complete(bus: Bus, run: str, task_id: str, group_size: int) -> bool:
    """Whether every rollout of a group has its delivery."""
    delivered = await bus.subjects(subjects.SAMPLES, subjects.sample_subject(run, task_id, "*"))
    return len(delivered) >= group_size


async def close_if_complete(bus: Bus, run: str, task_id: str, group_size: int) -> bool:
    """Announce the group of a task and mark the task closed, if all deliveries are there. Safe to repeat."""
    if not await is_complete(bus, run, task_id, group_size):
        return False
    await close(bus, run, task_id, group_size)
    return True


async def close(bus: Bus, run: str, task_id: str, group_size: int) -> None:
    """Announce a complete group, once, and mark its task closed. Safe to repeat."""
    group = Group(run=run, task_id=task_id, group_id=task_id, size=group_size)
    await bus.create(subjects.group_subject(run, task_id), encode(group))
    progress: Bucket[TaskProgress] = Bucket(bus, subjects.TASK_BUCKET, TaskProgress)
    key = subjects.task_key(run, task_id)
    found = await progress.get(key)
    if found is not None and found[0].progress != "closed":
        try:
            await progress.update(key, structs.replace(found[0], progress="closed"), found[1])
        except Conflict:
            log.info("task_moved_while_closing", task=task_id)
