"""The tasks of a run: bodies, written once, and how far each is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import TaskError
from rollyard.schemas.task import Task, TaskProgress

CACHED_TASKS: Final = 256


class TaskStore:
    """Bodies and progress in the `tasks` bucket, with a small cache of bodies: a group's rollouts share one."""

    def __init__(self, bus: Bus) -> None:
        self.progress: Bucket[TaskProgress] = Bucket(bus, subjects.TASK_BUCKET, TaskProgress)
        self._bodies: Bucket[Task] = Bucket(bus, subjects.TASK_BUCKET, Task)
        self._cache: OrderedDict[str, asyncio.Task[Task]] = OrderedDict()

    async def get(self, run: str, task_id: str) -> Task:
        """The body of an admitted task. Raises TaskError when there is none."""
        key = subjects.task_key(run, task_id) + ".body"
        reading = self._cache.get(key)
        if reading is None:
            # The rollouts of a group come together: they share one read.
            reading = self._cache[key] = asyncio.create_task(self._read(run, task_id, key))
            if len(self._cache) > CACHED_TASKS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        try:
            return await asyncio.shield(reading)
        except BaseException:
            if reading.done():
                self._cache.pop(key, None)
            raise

    async def _read(self, run: str, task_id: str, key: str) -> Task:
        found = await self._bodies.get_direct(key) or await self._bodies.get(key)
        if found is None:
            raise TaskError(f"task {task_id!r} of run {run!r} has no body", hint="was its run purged? submit it again")
        return found[0]

    async def put(self, run: str, task: Task) -> None:
        """Store the body of a task; the id must be set."""
        await self._bodies.put(subjects.task_key(run, task.id) + ".body", task)
