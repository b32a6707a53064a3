"""How often the calls of a run leave the tokens that they continue, and why: counted over its Parquet files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollyard.pipeline.datasets import query
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.sample import STRUCTURAL, DriftPoint

_RUNS_NAMED: Final = 8

_TOTAL: Final = "SELECT count(*), coalesce(sum(calls), 0) FROM rollouts WHERE run = $1"
_COUNTS: Final = """
SELECT entry.key, sum(entry.value)::BIGINT AS calls, count(*)
FROM (SELECT unnest(map_entries({column})) AS entry FROM rollouts WHERE run = $1)
GROUP BY entry.key ORDER BY calls DESC, entry.key"""
_EXAMPLES: Final = """
SELECT rollout_id, sample_id, point
FROM (SELECT rollout_id, sample_id, stream_seq, branch, unnest(drift) AS point FROM samples WHERE run = $1)
QUALIFY row_number() OVER (PARTITION BY point.reason ORDER BY stream_seq, branch, point.position, point.call_id) = 1"""


@dataclass(frozen=True, slots=True)
class Example:
    """A break that a sample shows."""

    rollout_id: str
    sample_id: str
    point: DriftPoint


@dataclass(frozen=True, slots=True)
class Reason:
    """One class of break. No sample may show it: those of the calls may have been dropped."""

    name: str
    calls: int
    rollouts: int
    example: Example | None

    @property
    def is_structural(self) -> bool:
        """Whether it belongs to how the agent works: nothing was lost by it."""
        return self.name in STRUCTURAL


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftTable:
    """The breaks of a run by reason, those by which tokens were lost first, and what else was counted of its calls."""

    run: str
    rollouts: int
    calls: int
    reasons: tuple[Reason, ...]
    lenience: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[str, int] = field(default_factory=dict)

    def share(self, calls: int) -> float:
        """The part of all calls of the run, 0 to 1."""
        return calls / self.calls if self.calls else 0.0


def drift_of(folder: Path, run: str) -> DriftTable:
    """The table of a run. Raises ConfigError when no rollout of it stands in the files."""
    ((rollouts, calls),) = query(folder, _TOTAL, [run])[1]
    if not rollouts:
        raise ConfigError(f"there is no rollout of run {run!r} in {folder}", hint=_runs(folder))
    examples = {
        point["reason"]: Example(rollout_id, sample_id, _point(point))
        for rollout_id, sample_id, point in query(folder, _EXAMPLES, [run])[1]
    }
    reasons = [Reason(name, count, found, examples.get(name)) for name, count, found in _counts(folder, run, "drift")]
    return DriftTable(
        run=run,
        rollouts=rollouts,
        calls=int(calls),
        reasons=tuple(sorted(reasons, key=lambda reason: reason.is_structural)),
        lenience={name: count for name, count, _ in _counts(folder, run, "lenience")},
        excluded={name: count for name, count, _ in _counts(folder, run, "excluded")},
    )


def _counts(folder: Path, run: str, column: str) -> list[tuple[str, int, int]]:
    return [(name, calls, found) for name, calls, found in query(folder, _COUNTS.format(column=column), [run])[1]]


def _point(row: dict[str, Any]) -> DriftPoint:
    ids = {name: TokenIds.of(row[name] or ()) for name in ("expected", "found")}
    return DriftPoint(**(row | ids))


def _runs(folder: Path) -> str:
    names = [name for (name,) in query(folder, "SELECT DISTINCT run FROM rollouts ORDER BY run")[1]]
    if not names:
        return "no rollout is written yet"
    more = f" and {len(names) - _RUNS_NAMED} more" if len(names) > _RUNS_NAMED else ""
    return f"runs there: {', '.join(names[:_RUNS_NAMED])}{more}; the newest may not be written yet"
