"""Removes sandboxes that no rollout names: what workers left that died between making a sandbox and saying so."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import RollyardError
from rollyard.schemas.rollout import RolloutState, SandboxRef
from rollyard.stages.sandbox import Labels
from rollyard.stages.stage import StageContext, now_ms

log = structlog.get_logger(__name__)

SWEEP_S: Final = 15.0
GRACE_MS: Final = 30_000


async def sweep_orphans(context: StageContext) -> None:
    """Sweep the places that this worker reaches, for ever."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            await sweep_once(context, GRACE_MS)
        except RollyardError as error:
            log.warning("sweep_failed", error=str(error))


async def sweep_once(context: StageContext, grace_ms: int) -> int:
    """Remove what has been orphaned for at least `grace_ms`; returns how many sandboxes went."""
    states: Bucket[RolloutState] = Bucket(context.bus, subjects.ROLLOUTS, RolloutState)
    removed = 0
    for backend in context.backends.values():
        for ref, labels in await backend.list_owned():
            if now_ms() - labels.created_ms < grace_ms:
                continue
            found = await states.get(subjects.rollout_key(labels.run, labels.rollout_id))
            if is_orphan(ref, labels, found[0] if found else None):
                log.info("orphan_removed", handle=ref.handle, rollout=labels.rollout_id, attempt=labels.attempt)
                await (await backend.open(ref)).destroy()
                removed += 1
    return removed


def is_orphan(ref: SandboxRef, labels: Labels, state: RolloutState | None) -> bool:
    """Whether nobody will ever use this sandbox again."""
    if state is None or state.position == "ended":
        return True
    if state.attempt != labels.attempt:
        return state.attempt > labels.attempt
    if state.position == "init":
        return False  # its INIT may still be at work
    return state.position in ("run", "eval") and state.sandbox != ref
