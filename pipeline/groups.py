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


async def close_if_complete(bus: Bus, run: str, task_id: str, group_size: int) -> bool:
    """Announce the group of a task and mark the task closed, if all deliveries are there. Safe to repeat."""
    delivered = await bus.subjects(subjects.SAMPLES, subjects.sample_subject(run, task_id, "*"))
    if len(delivered) < group_size:
        return False
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
    return True
