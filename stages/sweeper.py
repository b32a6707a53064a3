"""Removes sandboxes that no rollout names: what workers left that died between making a sandbox and saying so."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import RollyardError, SandboxError
from rollyard.schemas.rollout import RolloutState, SandboxRef
from rollyard.stages.owner import Owners
from rollyard.stages.sandbox import Labels, SandboxBackend
from rollyard.stages.stage import StageContext, now_ms

log = structlog.get_logger(__name__)

SWEEP_S: Final = 15.0
GRACE_MS: Final = 30_000
FREE_ROLES: Final = ("warm", "check")
"""Of sandboxes that belong to no rollout, but to the process that made them."""
FREE_AGE_MS: Final = 3_600_000
"""After so long one goes whose owner is not known on this machine."""


async def sweep_orphans(context: StageContext) -> None:
    """Sweep the places that this worker reaches, for ever."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            await sweep_once(context, GRACE_MS)
        except RollyardError as error:
            log.warning("sweep_failed", error=str(error))
        except Exception:  # the boundary: a backend of somebody else's own
            log.exception("sweep_failed")


async def sweep_once(context: StageContext, grace_ms: int) -> int:
    """Remove what has been orphaned for at least `grace_ms`; returns how many sandboxes went.

    Backends are swept side by side. Raises SandboxError for one that cannot list its own, after the others are done.
    """
    owners = Owners(context.config.sandboxes_dir())

    async def sweep(backend: SandboxBackend) -> int:
        return await _sweep_backend(context, backend, owners, grace_ms)

    swept = [asyncio.ensure_future(sweep(backend)) for backend in context.backends.values()]
    try:
        await asyncio.wait(swept)
    finally:
        for each in swept:
            each.cancel()
    return sum(each.result() for each in swept)


async def _sweep_backend(context: StageContext, backend: SandboxBackend, owners: Owners, grace_ms: int) -> int:
    states: Bucket[RolloutState] = Bucket(context.bus, subjects.ROLLOUTS, RolloutState)
    removed = 0
    for ref, labels in await backend.list_owned():
        age_ms = now_ms() - labels.created_ms
        if age_ms < grace_ms:
            continue
        owner = owners.alive(labels.owner) if labels.owner != context.worker else True
        if labels.role in FREE_ROLES:
            orphan = owner is False or (owner is None and age_ms > FREE_AGE_MS)
        else:
            orphan = is_orphan(ref, labels, await _state_of(states, labels), owner_lives=owner is not False)
        if not orphan:
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


def is_orphan(ref: SandboxRef, labels: Labels, state: RolloutState | None, *, owner_lives: bool = True) -> bool:
    """Whether nobody will ever use this sandbox of a rollout again."""
    if state is None or state.position == "ended":
        return True
    if state.attempt != labels.attempt:
        return state.attempt > labels.attempt
    if labels.role == "eval":
        return state.position in ("aggregate", "committing")
    if state.position == "init":
        # Its INIT may still be at work, or be about to name it.
        return not owner_lives
    return state.position in ("run", "eval") and state.sandbox != ref
