"""Removes sandboxes that no rollout names: what workers left that died between making a sandbox and saying so."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import RollyardError, SandboxError
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
            if not is_orphan(ref, labels, await _state_of(states, labels)):
                continue
            try:
                await (await backend.open(ref)).destroy()
            except SandboxError as error:
                log.warning("orphan_not_removed", handle=ref.handle, error=str(error))
                continue
            log.info("orphan_removed", handle=ref.handle, rollout=labels.rollout_id, attempt=labels.attempt)
            removed += 1
    return removed


async def _state_of(states: Bucket[RolloutState], labels: Labels) -> RolloutState | None:
    if labels.run:
        found = await states.get(subjects.rollout_key(labels.run, labels.rollout_id))
        return found[0] if found else None
    # Labels that cannot be read: the sandbox is half-made, or an agent broke them. The id alone is unique as well.
    same = [state async for _, state, _ in states.items(f"*.{labels.rollout_id}")]
    return same[0] if same else None


def is_orphan(ref: SandboxRef, labels: Labels, state: RolloutState | None) -> bool:
    """Whether nobody will ever use this sandbox again."""
    if state is None or state.position == "ended":
        return True
    if state.attempt != labels.attempt:
        return state.attempt > labels.attempt
    if state.position == "init":
        return False  # its INIT may still be at work
    return state.position in ("run", "eval") and state.sandbox != ref
