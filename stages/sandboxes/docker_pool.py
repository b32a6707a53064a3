"""Containers that are started before somebody needs them, so that nobody waits for the start.

A pool belongs to one worker. Its containers are of role `warm` until they are claimed, and end by themselves soon after
the worker said last that it lives.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import structlog

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import Labels, Plan
from rollyard.stages.sandboxes.docker_engine import Engine
from rollyard.stages.sandboxes.docker_labels import name_of
from rollyard.stages.sandboxes.docker_sandbox import DockerSandbox

log = structlog.get_logger(__name__)

RENEW_S: Final = 40.0
LIFE_S: Final = 120
MAX_AGE_S: Final = 1200.0
"""Older ones are replaced: sweepers take warm containers of over an hour for left ones."""


class Maker(Protocol):
    """Makes containers; the backend."""

    engine: Engine

    async def make(self, labels: Labels, plan: Plan) -> DockerSandbox:
        """A new container for a filled plan. Raises SandboxError."""
        ...


@dataclass(slots=True)
class _Warm:
    sandbox: DockerSandbox
    made_s: float
    renewed_s: float


@dataclass(slots=True)
class _Kind:
    """Plans that differ in nothing but their deadline."""

    plan: Plan
    owner: str
    ready: deque[_Warm] = field(default_factory=deque)
    making: asyncio.Task[None] | None = None


class WarmPool:
    """`size` containers of each of the `kinds` kinds of sandbox that were asked for last."""

    def __init__(self, maker: Maker, size: int, kinds: int) -> None:
        self._maker = maker
        self._size = size
        self._most_kinds = kinds
        self._kinds: OrderedDict[Plan, _Kind] = OrderedDict()
        self._ends: set[asyncio.Task[None]] = set()
        self._now: Callable[[], float] = time.monotonic

    async def take(self, labels: Labels, plan: Plan) -> DockerSandbox | None:
        """One for these labels, claimed; None: none is ready. Sees to it that there will be others."""
        if not self._size or labels.role == "warm":
            return None
        kind = self._kind(replace(plan, deadline_s=0.0), labels.owner)
        try:
            while kind.ready:
                warm = kind.ready.popleft()
                try:
                    await self._claim(warm.sandbox, labels, plan)
                except SandboxError as error:
                    log.info("warm_container_lost", handle=warm.sandbox.ref.handle, error=str(error))
                    self._drop(warm)
                except BaseException:
                    self._drop(warm)
                    raise
                else:
                    return warm.sandbox
            return None
        finally:
            self._fill(kind)

    async def renew(self) -> None:
        """Let all live on, and replace the old ones."""
        for kind in list(self._kinds.values()):
            for warm in list(kind.ready):
                if self._now() - warm.made_s > MAX_AGE_S:
                    with suppress(ValueError):  # it was taken just now
                        kind.ready.remove(warm)
                        self._drop(warm)
                elif self._now() - warm.renewed_s > RENEW_S:
                    warm.renewed_s = self._now()
                    try:
                        await warm.sandbox.set_deadline(LIFE_S, fixed=False)
                    except SandboxError:
                        with suppress(ValueError):
                            kind.ready.remove(warm)
                            self._drop(warm)
            self._fill(kind)

    async def close(self) -> None:
        """Remove all that are ready."""
        kinds = [self._kinds.popitem()[1] for _ in range(len(self._kinds))]
        for kind in kinds:
            self._end(kind)
        if making := [kind.making for kind in kinds if kind.making is not None]:
            await asyncio.wait(making)
        while self._ends:
            await asyncio.wait(self._ends)

    def _kind(self, plan: Plan, owner: str) -> _Kind:
        if plan not in self._kinds:
            self._kinds[plan] = _Kind(plan, owner)
            while len(self._kinds) > self._most_kinds:
                self._end(self._kinds.popitem(last=False)[1])
        self._kinds.move_to_end(plan)
        return self._kinds[plan]

    def _fill(self, kind: _Kind) -> None:
        if self._wanted(kind) and len(kind.ready) < self._size and (kind.making is None or kind.making.done()):
            kind.making = asyncio.create_task(self._make(kind))

    async def _make(self, kind: _Kind) -> None:
        while len(kind.ready) < self._size and self._wanted(kind):
            labels = Labels(
                run="", rollout_id="warm", attempt=0, owner=kind.owner, created_ms=int(time.time() * 1000), role="warm"
            )
            try:
                sandbox = await self._maker.make(labels, kind.plan)
            except SandboxError as error:
                log.warning("warm_container_not_made", error=str(error))
                return
            warm = _Warm(sandbox, self._now(), self._now())
            if self._wanted(kind):
                kind.ready.append(warm)
            else:
                self._drop(warm)

    def _wanted(self, kind: _Kind) -> bool:
        return self._kinds.get(kind.plan) is kind

    async def _claim(self, sandbox: DockerSandbox, labels: Labels, plan: Plan) -> None:
        name = name_of(labels, sandbox.facts.nonce, claimed=True)
        # The name first: who dies between the two leaves a sandbox that is somebody's, and ends soon.
        await self._maker.engine.call(lambda client: client.rename(sandbox.ref.handle, name))
        await sandbox.set_deadline(max(1, round(plan.deadline_s + 0.5)), fixed=True)

    def _end(self, kind: _Kind) -> None:
        while kind.ready:
            self._drop(kind.ready.popleft())

    def _drop(self, warm: _Warm) -> None:
        task = asyncio.create_task(_destroyed(warm.sandbox))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)


async def _destroyed(sandbox: DockerSandbox) -> None:
    try:
        await sandbox.destroy()
    except SandboxError as error:
        log.warning("warm_container_not_removed", handle=sandbox.ref.handle, error=str(error))
