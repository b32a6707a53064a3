"""Replay with the stitchers and evaluation rules of this package: what `rollyard replay` runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta, Struct

from rollyard.pipeline.log import Events, LogSource, RolloutLog
from rollyard.pipeline.replay import (
    Mismatch,
    Progress,
    ReplayReport,
    commit_of,
    in_batches,
    mismatches_of,
    replay,
    stored_bytes,
    unreadable,
)
from rollyard.pipeline.sample_diff import Diff, SampleChange, Totals, changes_of
from rollyard.schemas.sample import Commit, Delivery
from rollyard.stages.arrow import Received
from rollyard.stages.delivery import delivery_of
from rollyard.stages.reevaluation import Reevaluation
from rollyard.stages.remake import Draft, Recipe, draft_of, remade
from rollyard.stages.stitching import outcome_of, samples_of

Write = Callable[[Received], None]
OnChanges = Callable[[Sequence[SampleChange]], None]


class RemakeReport(Struct, frozen=True, kw_only=True):
    """What came of making the samples of a run anew."""

    run: str
    rollouts: Annotated[int, Meta(description="rollouts with a commit")]
    uncommitted: Annotated[int, Meta(description="rollouts that are not at their end yet")]
    recovered: Annotated[int, Meta(description="rollouts that aggregate had given up, and that have samples now")]
    made: Annotated[Totals, Meta(description="the new samples")]
    excluded: Annotated[dict[str, int], Meta(description="calls left out of them, by reason")]
    judged: Annotated[int, Meta(description="rollouts with a verdict of the new evaluation rule")]
    not_judged: Annotated[dict[str, int], Meta(description="rollouts for which that rule failed, by its words")]
    mismatches: Annotated[
        tuple[Mismatch, ...],
        Meta(description="committed samples that the log does not reproduce, where they were rebuilt, or not read"),
    ]


async def replay_run(source: LogSource, run: str, *, progress: Progress | None = None) -> ReplayReport:
    """Rebuild the samples of a run from its log and compare them with the commits.

    Raises what reading the source raises.
    """
    return await replay(source, run, samples_of, progress=progress)


async def remake_run(
    source: LogSource,
    run: str,
    recipe: Recipe,
    *,
    judge: Reevaluation | None = None,
    diff: Diff | None = None,
    on_changes: OnChanges | None = None,
    write: Write | None = None,
    progress: Progress | None = None,
) -> RemakeReport:
    """Make the samples of a run by `recipe`, and hand each rollout to `write`, in a thread.

    With `diff` the committed samples are rebuilt too, and the changes are counted there and told to `on_changes`.
    `judge` must be there when the recipe has a rule. Raises what reading the source and `write` raise.
    """
    making = _Remaking(recipe=recipe, judge=judge, diff=diff, on_changes=on_changes, write=write, progress=progress)
    uncommitted = await in_batches(source, run, making.batch)
    return RemakeReport(
        run=run,
        rollouts=making.rollouts,
        uncommitted=uncommitted,
        recovered=making.recovered,
        made=making.made,
        excluded=dict(making.excluded),
        judged=judge.judged if judge else 0,
        not_judged=dict(judge.failed) if judge else {},
        mismatches=tuple(making.mismatches),
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """A rollout that could be read, as it was committed, and on its way to new samples."""

    rollout: RolloutLog
    commit: Commit
    events: Events
    draft: Draft


@dataclass(slots=True, kw_only=True)
class _Remaking:
    """Works through batches and counts. `_open` and `_make` run in a thread, one at a time."""

    recipe: Recipe
    judge: Reevaluation | None
    diff: Diff | None
    on_changes: OnChanges | None
    write: Write | None
    progress: Progress | None
    read_bytes: int = 0
    rollouts: int = 0
    recovered: int = 0
    made: Totals = field(default_factory=Totals)
    excluded: Counter[str] = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)

    async def batch(self, rollouts: list[RolloutLog]) -> None:
        opened = await asyncio.to_thread(self._open, rollouts)
        if self.judge is not None:
            drafts = await self.judge.judge([each.draft for each in opened])
            opened = [replace(each, draft=draft) for each, draft in zip(opened, drafts, strict=True)]
        await asyncio.to_thread(self._make, opened)
        self.rollouts += len(rollouts)
        self.read_bytes += sum(map(stored_bytes, rollouts))
        if self.progress:
            self.progress(self.rollouts, self.made.samples, self.read_bytes)

    def _open(self, rollouts: list[RolloutLog]) -> list[_Opened]:
        opened = []
        for rollout in rollouts:
            commit = None
            try:
                commit = commit_of(rollout)
                events = rollout.events()
                opened.append(_Opened(rollout, commit, events, draft_of(events, commit, self.recipe)))
            except Exception as error:  # noqa: BLE001 - the boundary to one rollout: the others are made all the same
                self.mismatches += unreadable(rollout.rollout_id, commit, error)
        return opened

    def _make(self, opened: list[_Opened]) -> None:
        for each in opened:
            try:
                before = self._committed(each)
                after = remade(each.draft, self.recipe.reward)
            except Exception as error:  # noqa: BLE001 - the boundary to one rollout, as above
                self.mismatches += unreadable(each.rollout.rollout_id, each.commit, error)
                continue
            self._count(each, before, after)
            if self.write:
                last = each.rollout.stored[-1]
                self.write(Received(last.seq, last.time_ms, after))

    def _committed(self, each: _Opened) -> Delivery | None:
        """The rollout with its samples as committed, where they are asked for."""
        if self.diff is None:
            return None
        return delivery_of(each.commit, outcome_of(each.events, each.commit), each.events)

    def _count(self, each: _Opened, before: Delivery | None, after: Delivery) -> None:
        self.recovered += each.draft.recovered
        self.made.add(after.samples, after.reward)
        self.excluded.update(after.excluded)
        as_committed = before or (None if self.recipe.changes() else after)
        if as_committed is not None:
            self.mismatches += mismatches_of(each.commit, as_committed.samples)
        if self.diff is not None and before is not None:
            changes = changes_of(before.samples, after.samples)
            self.diff.before.add(before.samples, before.reward)
            self.diff.after.add(after.samples, after.reward)
            self.diff.add(changes)
            if changes and self.on_changes:
                self.on_changes(changes)
