"""Version 2 of the stitcher: a forest of ids and messages, and samples by a policy. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rollyard.schemas.sample import Commit
from rollyard.stages.calls import Event
from rollyard.stages.stitchers import assembly
from rollyard.stages.stitchers.forest import grow
from rollyard.stages.stitchers.outcome import Outcome, counted

VERSION: Final = assembly.VERSION


def outcome_of(events: Iterable[tuple[int, Event]], commit: Commit) -> Outcome:
    """What becomes of a rollout."""
    if commit.status == "cancelled" or (commit.status == "failed" and commit.policy.failed == "drop"):
        return Outcome()
    lets_in = counted(events, commit)
    return assembly.assemble(grow(lets_in.calls, commit.policy.lenience_off), commit, lets_in)
