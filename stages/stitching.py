"""A rollout's events to its samples, by the version of the stitcher that its commit names. Pure.

Contract: docs/architecture.md sections 5.7 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from rollyard.schemas.errors import ReplayError
from rollyard.schemas.sample import Commit, Sample
from rollyard.stages.calls import Event
from rollyard.stages.stitchers import v1, v2
from rollyard.stages.stitchers.outcome import Outcome

Stitcher = Callable[[Iterable[tuple[int, Event]], Commit], Outcome]

STITCHERS: Final[dict[str, Stitcher]] = {v1.VERSION: v1.outcome_of, v2.VERSION: v2.outcome_of}
"""By version. A released version stays, since a commit that exists is obeyed."""

STITCHER_VERSION: Final = v2.VERSION
"""The newest: it goes into every new commit."""


def outcome_of(events: Iterable[tuple[int, Event]], commit: Commit) -> Outcome:
    """What becomes of a rollout: a function of the events up to the cut and the commit, and of nothing else.

    Raises ReplayError when the commit asks for a version of the stitcher that is not in this package.
    """
    version = commit.stitcher or v1.VERSION
    if version not in STITCHERS:
        raise ReplayError(
            f"rollout {commit.rollout_id} was stitched by version {version}, here are {', '.join(STITCHERS)}",
            hint="use the release that wrote the commit, or a later one",
        )
    return STITCHERS[version](events, commit)


def samples_of(events: Iterable[tuple[int, Event]], commit: Commit) -> tuple[Sample, ...]:
    """The samples of `outcome_of`."""
    return outcome_of(events, commit).samples
