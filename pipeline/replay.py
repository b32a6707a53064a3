"""Replay: rebuild every sample of a run from the log alone, and compare digests with the commits.

Contract: docs/architecture.md section 5.12. It needs neither the sample stream nor Parquet, and asks no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.log import Events, LogSource, RolloutLog, decode_event
from rollyard.pipeline.single_error import single_error
from rollyard.schemas.errors import RollyardError
from rollyard.schemas.sample import Commit, Sample

Rebuild = Callable[[Events, Commit], tuple[Sample, ...]]
Progress = Callable[[int, int, int], None]
"""Told after each batch: rollouts, samples and stored bytes so far."""

Problem = Literal["differs", "missing", "unexpected", "unreadable"]
BATCH_BYTES: Final = 4_000_000


class Mismatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample that the log does not reproduce as it was committed."""

    rollout_id: str
    sample_id: Annotated[str, Meta(description="empty where no sample of the rollout could be rebuilt or is known")]
    problem: Annotated[
        Problem,
        Meta(
            description="differs from its digest; missing: committed, not rebuilt; unexpected: rebuilt, not committed; "
            "unreadable: the rollout's events cannot be read or stitched"
        ),
    ]
    detail: str = ""

    def __str__(self) -> str:
        what = f"sample {self.sample_id}" if self.sample_id else "its samples"
        return f"{self.problem}: {what} of rollout {self.rollout_id}{': ' if self.detail else ''}{self.detail}"


class ReplayReport(Struct, frozen=True, kw_only=True):
    """What a replay found. It is equal when there is no mismatch."""

    run: str
    rollouts: Annotated[int, Meta(description="rollouts with a commit")]
    uncommitted: Annotated[int, Meta(description="rollouts that are not at their end yet")]
    samples: Annotated[int, Meta(description="samples that commits name")]
    equal: Annotated[int, Meta(description="samples rebuilt with the digest that was committed")]
    mismatches: tuple[Mismatch, ...]

    @property
    def ok(self) -> bool:
        """Whether the log reproduces everything."""
        return not self.mismatches


def render_report(report: ReplayReport) -> str:
    """The report for people: a line for each mismatch, and one for the whole."""
    whole = f"{report.equal} of {report.samples} samples of {report.rollouts} rollouts equal their commits."
    return "\n".join([*map(str, report.mismatches), whole + still_open(report.uncommitted)])


def still_open(rollouts: int) -> str:
    """How many rollouts a replay left out, as a sentence with a space before it; empty for none."""
    return f" {rollouts} rollouts are not at their end yet." if rollouts else ""


async def replay(source: LogSource, run: str, rebuild: Rebuild, *, progress: Progress | None = None) -> ReplayReport:
    """Rebuild the samples of a run with `rebuild(events, commit)`, and compare. Raises what reading raises."""
    rollouts = samples = size = missed = 0
    mismatches: list[Mismatch] = []

    async def compare_all(batch: list[RolloutLog]) -> None:
        nonlocal rollouts, samples, size, missed
        for named, found in await asyncio.to_thread(lambda: [_compare(rollout, rebuild) for rollout in batch]):
            samples += named
            missed += len({each.sample_id for each in found if each.problem != "unexpected" and each.sample_id})
            mismatches.extend(found)
        rollouts += len(batch)
        size += sum(map(stored_bytes, batch))
        if progress:
            progress(rollouts, samples, size)

    uncommitted = await in_batches(source, run, compare_all)
    return ReplayReport(
        run=run,
        rollouts=rollouts,
        uncommitted=uncommitted,
        samples=samples,
        equal=samples - missed,
        mismatches=tuple(mismatches),
    )


async def in_batches(source: LogSource, run: str, work: Callable[[list[RolloutLog]], Awaitable[None]]) -> int:
    """Hand the committed rollouts of a run to `work`, some megabytes at a time; returns how many have no commit.

    One batch is worked on while the next one is read: no more than three are held.
    """
    ready: asyncio.Queue[list[RolloutLog] | None] = asyncio.Queue(1)
    uncommitted = 0

    async def read() -> None:
        nonlocal uncommitted
        batch: list[RolloutLog] = []
        size = 0
        async for rollout in source.rollouts(run):
            if not rollout.committed:
                uncommitted += 1
                continue
            batch.append(rollout)
            size += stored_bytes(rollout)
            if size >= BATCH_BYTES:
                await ready.put(batch)
                batch, size = [], 0
        if batch:
            await ready.put(batch)
        await ready.put(None)

    with single_error():
        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            while (batch := await ready.get()) is not None:
                await work(batch)
    return uncommitted


def stored_bytes(rollout: RolloutLog) -> int:
    """Size of a rollout's events as they are stored."""
    return sum(len(stored.data) for stored in rollout.stored)


def commit_of(rollout: RolloutLog) -> Commit:
    """The commit that ends a rollout's events. Raises DecodeError."""
    commit = decode_event(rollout.stored[-1], rollout.contents)
    assert isinstance(commit, Commit)
    return commit


def _compare(rollout: RolloutLog, rebuild: Rebuild) -> tuple[int, list[Mismatch]]:
    """How many samples the commit names, and what is wrong with them."""
    commit = None
    try:
        commit = commit_of(rollout)
        return len(commit.samples), mismatches_of(commit, rebuild(rollout.events(), commit))
    except Exception as error:  # noqa: BLE001 - the boundary to one rollout: the others are replayed all the same
        return len(commit.samples) if commit else 0, unreadable(rollout.rollout_id, commit, error)


def mismatches_of(commit: Commit, rebuilt: tuple[Sample, ...]) -> list[Mismatch]:
    """What is wrong with samples that were rebuilt as `commit` says. Pure."""
    committed = {each.sample_id: each.digest for each in commit.samples}
    found = {sample.sample_id: sample_digest(sample) for sample in rebuilt}

    def mismatch(sample_id: str, problem: Problem) -> Mismatch:
        return Mismatch(rollout_id=commit.rollout_id, sample_id=sample_id, problem=problem)

    wrong = [
        mismatch(sample_id, "differs" if sample_id in found else "missing")
        for sample_id, digest in committed.items()
        if found.get(sample_id) != digest
    ]
    return wrong + [mismatch(sample_id, "unexpected") for sample_id in found if sample_id not in committed]


def unreadable(rollout_id: str, commit: Commit | None, error: Exception) -> list[Mismatch]:
    """A mismatch for each sample that a rollout was to have, or one for all of them where they are not known."""
    names = [each.sample_id for each in commit.samples] if commit else []
    detail = str(error) if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}"
    return [
        Mismatch(rollout_id=rollout_id, sample_id=name, problem="unreadable", detail=detail) for name in names or [""]
    ]
