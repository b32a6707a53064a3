"""A rollout for people: its samples in the Parquet files, and what was counted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollyard.pipeline.datasets import find_samples, query
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.sample import Sample

_MOST_BRANCHES: Final = 100_000

_FIND: Final = """
SELECT run, rollout_id FROM samples WHERE starts_with(sample_id, $1) OR starts_with(rollout_id, $1)
UNION SELECT run, rollout_id FROM rollouts WHERE starts_with(rollout_id, $1) ORDER BY run, rollout_id"""

_FACTS: Final = """
SELECT status, failure_kind, failure_message, reward, metrics, answer, calls, excluded, lenience, rewards
FROM rollouts WHERE run = $1 AND rollout_id = $2 ORDER BY stream_seq DESC LIMIT 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout. What the files do not tell is empty or None."""

    run: str
    rollout_id: str
    samples: tuple[Sample, ...] = ()
    """All of them, in the order of their branches."""
    asked: tuple[Sample, ...] = ()
    """Those whose text is asked for."""
    status: str = ""
    failure: str = ""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""
    calls: int | None = None
    excluded: Mapping[str, int] = field(default_factory=dict)
    lenience: Mapping[str, int] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)


def find_rollouts(folder: Path, identity: str) -> list[tuple[str, str]]:
    """Run and id of the rollouts whose id, or a sample's of theirs, begins with `identity`.

    Raises ConfigError when there is none.
    """
    found = query(folder, _FIND, [identity])[1]
    if not found:
        raise ConfigError(
            f"no sample or rollout in {folder} has an id that begins with {identity!r}",
            hint="`rollyard samples ls` lists them; the newest may not be written yet",
        )
    return [(run, rollout_id) for run, rollout_id in found]


def read_rollout(folder: Path, run: str, rollout_id: str, identity: str) -> RolloutView:
    """One of them. `identity` tells which samples are asked for: all, unless it is the start of a sample's id."""
    found = find_samples(folder, rollout_id, limit=_MOST_BRANCHES)
    samples = tuple(sample for sample in found if (sample.run, sample.rollout_id) == (run, rollout_id))
    asked = tuple(sample for sample in samples if sample.sample_id.startswith(identity))
    if rollout_id.startswith(identity):
        asked = samples
    for row in query(folder, _FACTS, [run, rollout_id])[1]:
        status, kind, message, reward, metrics, answer, calls, excluded, lenience, rewards = row
        return RolloutView(
            run=run,
            rollout_id=rollout_id,
            samples=samples,
            asked=asked,
            status=status or "",
            failure=f"{kind}: {message}" if kind else "",
            reward=reward,
            metrics=metrics or {},
            answer=answer or "",
            calls=calls,
            excluded=excluded or {},
            lenience=lenience or {},
            rewards=rewards or {},
        )
    return view_of(samples, asked)


def view_of(samples: tuple[Sample, ...], asked: tuple[Sample, ...] | None = None) -> RolloutView:
    """What samples alone tell of their rollout."""
    first = samples[0]
    return RolloutView(
        run=first.run,
        rollout_id=first.rollout_id,
        samples=samples,
        asked=samples if asked is None else asked,
        status=first.status,
        reward=first.reward if first.rollout_reward is None else first.rollout_reward,
    )
