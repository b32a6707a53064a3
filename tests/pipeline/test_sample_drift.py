from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from branches import RE_TOKENISED, branch, delivery, forest, write

from rollyard.pipeline.viewer.drift import drift_of
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.sample import Delivery, Sample


def other(number: int, samples: tuple[Sample, ...] = (), **changes: Any) -> Delivery:
    return delivery(samples, **({"rollout_id": f"r{number}", "index": number} | changes))


def test_breaks_are_counted_by_reason_with_an_example_each(tmp_path: Path) -> None:
    samples = forest()
    write(
        tmp_path,
        other(1, drift={"re_tokenised": 3, "tools_changed": 1}, calls=10, lenience={"trailing_space": 2}),
        delivery(samples, drift={"re_tokenised": 1, "sub_agent": 7}, lenience={"masked_secrets": 1}),
        other(2, calls=1, excluded={"lost": 1, "dead": 2}),
        other(3, run="another", calls=100, drift={"retry": 5}),
    )
    found = drift_of(tmp_path, "demo")
    assert (found.rollouts, found.calls) == (3, 20)
    assert [(each.name, each.calls, each.rollouts, each.is_structural) for each in found.reasons] == [
        ("re_tokenised", 4, 2, False),
        ("tools_changed", 1, 1, False),
        ("sub_agent", 7, 1, True),
    ]
    assert found.share(4) == 0.2
    assert found.lenience == {"trailing_space": 2, "masked_secrets": 1}
    assert found.excluded == {"dead": 2, "lost": 1}
    broken, dropped, structural = (each.example for each in found.reasons)
    assert broken is not None and structural is not None
    assert (broken.sample_id, broken.rollout_id, broken.point) == (
        samples[1].sample_id,
        samples[1].rollout_id,
        RE_TOKENISED,
    )
    assert structural.point == samples[2].drift[0]
    assert dropped is None


def test_the_example_is_the_first_one(tmp_path: Path) -> None:
    def rollout(number: int) -> Delivery:
        sample = branch(0, 1, [("c5", "p", "r")], drift=(RE_TOKENISED,), rollout_id=f"r{number}")
        return other(number, (sample,), drift={"re_tokenised": 1})

    write(tmp_path, rollout(9), rollout(1), rollout(4))
    (reason,) = drift_of(tmp_path, "demo").reasons
    assert reason.example is not None
    assert reason.example.rollout_id == "r9"


def test_a_run_that_nobody_knows_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rollout of run 'nope'") as caught:
        drift_of(tmp_path, "nope")
    assert caught.value.hint == "no rollout is written yet"
    write(tmp_path, *(other(number, run=f"run{number}") for number in range(10)))
    with pytest.raises(ConfigError, match="no rollout of run 'nope'") as caught:
        drift_of(tmp_path, "nope")
    assert "run0, run1" in caught.value.hint
    assert "and 2 more" in caught.value.hint


def test_files_of_an_older_release_count_as_without_drift(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts" / "run=demo"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"run": ["demo"], "rollout_id": ["r1"]}), folder / "part-1-1.parquet")
    found = drift_of(tmp_path, "demo")
    assert (found.rollouts, found.calls, found.reasons, found.share(0)) == (1, 0, (), 0.0)
