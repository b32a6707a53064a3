"""Purging a run from the log, once its archive was verified and nothing can write to it any more.

Contract: docs/architecture.md sections 4 and 5.13. What is created once can be created again after a purge, so a run is
purged only when all its tasks are closed, its rollouts ended and none of its messages is on the way. Calls and lives go
first, commits last: whoever finds a commit still obeys it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from msgspec import structs

from rollyard.pipeline.archive.check import Check
from rollyard.pipeline.archive.folder import Manifest, RunArchive
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.task import TaskProgress

KINDS: Final = ("call", "life", "commit")
NAMED: Final = 3


async def check_closed(bus: Bus, run: str) -> set[str]:
    """The ids of the rollouts of a run. Raises ArchiveError, which says what is open, unless everything is closed."""
    token = subjects.token(run)
    waiting = sum((await bus.subjects(subjects.TASKS, subjects.task_subject(run))).values())
    tasks = await _values(bus, subjects.TASK_BUCKET, f"{token}.*", TaskProgress)
    states = await _values(bus, subjects.ROLLOUTS, f"{token}.*", RolloutState)
    open_tasks = [task.task_id or key for key, task in tasks.items() if task.progress != "closed"]
    open_rollouts = [state.rollout.rollout_id for state in states.values() if state.position != "ended"]
    # Under a worker that has died a message comes again, also after the end of its rollout.
    due = await bus.subjects(subjects.STAGES, f"stage.*.*.{token}") | await bus.subjects(
        subjects.STAGES, f"stage.*.{token}"
    )
    found = [
        f"{waiting} tasks are not admitted yet" if waiting else "",
        f"{len(open_tasks)} tasks are open ({_some(open_tasks)})" if open_tasks else "",
        f"{len(open_rollouts)} rollouts have not ended ({_some(open_rollouts)})" if open_rollouts else "",
        f"{sum(due.values())} messages are on their way ({_some(list(due))})" if due else "",
    ]
    if any(found):
        raise ArchiveError(
            f"run {run!r} cannot be purged: {'; '.join(filter(None, found))}",
            hint="wait for its end, or `rollyard cancel` it; `rollyard status` shows how far it is",
        )
    return {state.rollout.rollout_id for state in states.values()}


async def _values(bus: Bus, bucket: str, key_filter: str, kind: type[Any]) -> dict[str, Any]:
    """The values of a bucket. What any server shows may be old, so the leader says which keys there are."""
    there = await bus.subjects(subjects.kv_stream(bucket), subjects.kv_subject(bucket, key_filter))
    values = {key: value async for key, value, _ in Bucket[Any](bus, bucket, kind).items(key_filter)}
    if len(values) < len(there):
        raise ArchiveError(f"bucket {bucket} shows {len(values)} of {len(there)} keys", hint="try again in a moment")
    return values


def check_complete(check: Check, rollouts: set[str]) -> None:
    """What was verified is every rollout of a run, each with its commit. Raises ArchiveError."""
    if lacking := rollouts - check.committed:
        raise ArchiveError(
            f"{len(lacking)} rollouts have ended and no commit in the archive ({_some(sorted(lacking))})",
            hint="their events may be needed still: nothing was purged",
        )
    if unknown := check.rollouts - rollouts:
        raise ArchiveError(
            f"{len(unknown)} rollouts in the archive are not known to bucket rollouts ({_some(sorted(unknown))})",
            hint="whether they have ended cannot be told: nothing was purged",
        )


async def purge(
    bus: Bus,
    archive: RunArchive,
    manifest: Manifest,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> int:
    """Remove what was verified from the LOG; returns how many messages. Safe to repeat. Raises BusError."""
    upto = manifest.verified_seq
    await asyncio.to_thread(archive.write_manifest, structs.replace(manifest, purged_seq=upto))
    removed = 0
    for kind in KINDS:
        # Subject by subject: one purge of them all would keep writers out of the log for its whole time.
        found = await bus.subjects(subjects.LOG, subjects.log_subject(archive.run, "*", kind))
        for number, subject in enumerate(found, 1):
            done = await bus.api(f"STREAM.PURGE.{subjects.LOG}", {"filter": subject, "seq": upto + 1})
            removed += int(done.get("purged", 0))
            checkpoint("archive.purged_one")
            if number % 1000 == 0:
                progress(f"purging: {number:,} of {len(found):,} subjects of kind {kind}, {removed:,} events")
    return removed


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
