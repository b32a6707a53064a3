"""Replay: rebuild every sample of a run from the log alone, and compare digests with the commits.

Contract: docs/architecture.md section 5.12. It needs neither the sample stream nor Parquet, and asks no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.log import Events, RolloutLog, decode_event, rollouts_of
from rollyard.schemas.errors import RollyardError
from rollyard.schemas.sample import Commit, Sample

Rebuild = Callable[[Events, Commit], tuple[Sample, ...]]
Problem = Literal["differs", "missing", "unexpected", "unreadable"]
PROGRESS_EVERY = 100


class Mismatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample that the log does not reproduce as it was committed."""

    rollout_id: str
    sample_id: Annotated[str, Meta(description="empty where no sample of the rollout could be rebuilt or is known")]
    problem: Annotated[
        Problem,
        Meta(
            description="differs from its digest; missing: committed, not rebuilt; unexpected: rebuilt, not committed; "
            "unreadable: the rollout's events cannot be read"
        ),
    ]
    detail: str = ""


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
    """The report for people: one line, and one more for each mismatch."""
    lines = [f"run {report.run}: {report.equal} of {report.samples} samples of {report.rollouts} rollouts are equal"]
    if report.uncommitted:
        lines.append(f"{report.uncommitted} rollouts are not at their end yet")
    for each in report.mismatches:
        what = f"sample {each.sample_id}" if each.sample_id else "its samples"
        lines.append(f"{each.problem}: {what} of rollout {each.rollout_id}{': ' if each.detail else ''}{each.detail}")
    return "\n".join(lines)


async def replay(
    bus: Bus, run: str, rebuild: Rebuild, *, progress: Callable[[int, int], None] | None = None
) -> ReplayReport:
    """Rebuild the samples of a run with `rebuild(events, commit)` and compare.

    `progress(rollouts, samples)` is called every hundred rollouts and at the end. Raises BusError.
    """
    rollouts = uncommitted = samples = 0
    mismatches: list[Mismatch] = []
    missed = 0
    async for rollout in rollouts_of(bus, run):
        if not rollout.committed:
            uncommitted += 1
            continue
        named, found = await asyncio.to_thread(_compare, rollout, rebuild)
        rollouts += 1
        samples += named
        missed += len({each.sample_id for each in found if each.problem != "unexpected" and each.sample_id})
        mismatches += found
        if progress and rollouts % PROGRESS_EVERY == 0:
            progress(rollouts, samples)
    if progress:
        progress(rollouts, samples)
    return ReplayReport(
        run=run,
        rollouts=rollouts,
        uncommitted=uncommitted,
        samples=samples,
        equal=samples - missed,
        mismatches=tuple(mismatches),
    )


def _compare(rollout: RolloutLog, rebuild: Rebuild) -> tuple[int, list[Mismatch]]:
    """How many samples the commit names, and what is wrong with them."""
    committed: dict[str, str] = {}
    try:
        commit = decode_event(rollout.stored[-1], rollout.contents)
        assert isinstance(commit, Commit)
        committed = {each.sample_id: each.digest for each in commit.samples}
        rebuilt = {sample.sample_id: sample_digest(sample) for sample in rebuild(rollout.events(), commit)}
    except RollyardError as error:
        names = list(committed) or [""]
        return len(committed), [_mismatch(rollout, name, "unreadable", str(error)) for name in names]
    found = [
        _mismatch(rollout, sample_id, "missing" if sample_id not in rebuilt else "differs")
        for sample_id, digest in committed.items()
        if rebuilt.get(sample_id) != digest
    ]
    found += [_mismatch(rollout, sample_id, "unexpected") for sample_id in rebuilt.keys() - committed.keys()]
    return len(committed), found


def _mismatch(rollout: RolloutLog, sample_id: str, problem: Problem, detail: str = "") -> Mismatch:
    return Mismatch(rollout_id=rollout.rollout_id, sample_id=sample_id, problem=problem, detail=detail)
