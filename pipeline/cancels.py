"""Who is cancelled: a local view of the `cancel` bucket, and a scope that ends work when its rollout is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.watching import watching
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.rollout import Rollout


class Cancelled(Exception):
    """The rollout that this scope worked on was cancelled."""


class Cancels:
    """Follows the `cancel` bucket. Make one with `async with Cancels.following(bus) as cancels`."""

    def __init__(self) -> None:
        self._known: dict[str, Cancel] = {}
        self._scopes: dict[asyncio.Task[object], Rollout] = {}
        self._hit: set[asyncio.Task[object]] = set()

    @classmethod
    @asynccontextmanager
    async def following(cls, bus: Bus) -> AsyncIterator[Cancels]:
        """A view that is complete for everything cancelled before this call."""
        cancels = cls()
        async with watching(partial(cancels._follow, bus)):
            yield cancels

    def find(self, rollout: Rollout) -> Cancel | None:
        """The cancel that covers a rollout, or None."""
        for key in _keys(rollout):
            if key in self._known:
                return self._known[key]
        return None

    @contextmanager
    def scope(self, rollout: Rollout) -> Iterator[None]:
        """Raises Cancelled out of the block, at its next await, when the rollout is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        if self.find(rollout) is not None:
            raise Cancelled
        self._scopes[task] = rollout
        try:
            yield
        except asyncio.CancelledError:
            if task in self._hit and task.uncancel() == 0:
                raise Cancelled from None
            raise
        finally:
            self._scopes.pop(task, None)
            self._hit.discard(task)

    async def _follow(self, bus: Bus, ready: asyncio.Event) -> None:
        bucket: Bucket[Cancel] = Bucket(bus, subjects.CANCEL, Cancel)
        async for key, cancel, _ in bucket.watch():
            if not key:
                ready.set()
            elif cancel is None:
                self._known.pop(key, None)
            else:
                self._known[key] = cancel
                self._end(key)

    def _end(self, key: str) -> None:
        for task, rollout in self._scopes.items():
            if key in _keys(rollout) and task not in self._hit:
                self._hit.add(task)
                task.cancel()


def _keys(rollout: Rollout) -> tuple[str, str, str]:
    run, task_id = rollout.run, rollout.task_id
    return (
        subjects.cancel_key(run),
        subjects.cancel_key(run, task_id),
        subjects.cancel_key(run, task_id, rollout.index),
    )
