from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
from msgspec import structs

from rollyard.pipeline.arrow_schema import ROLLOUTS_SCHEMA, SAMPLES_SCHEMA, describe
from rollyard.pipeline.datasets import find_samples, query, query_arrow
from rollyard.schemas.failure import Failure
from rollyard.schemas.sample import Commit, Delivery, Sample
from rollyard.stages.arrow import Received, rollouts_table, samples_table
from rollyard.stages.cuts import Cuts
from rollyard.stages.stitching import samples_of


def delivery_of(commit: Commit, samples: tuple[Sample, ...], **changes: Any) -> Delivery:
    same = ("run", "task_id", "group_id", "group_size", "rollout_id", "index", "attempt", "status")
    facts = {name: getattr(commit, name) for name in same}
    return Delivery(**(facts | {"samples": samples, "metadata": commit.metadata} | changes))


def some_deliveries(new_session: Any) -> list[Received]:
    found = []
    for seed in range(4):
        session = new_session(random.Random(seed)).play(12)
        commit = structs.replace(session.close(reward=seed / 2), rollout_id=f"r{seed}", index=seed)
        delivery = delivery_of(
            commit,
            samples_of(session.events, commit),
            reward=seed / 2,
            metrics={"b": 1.5, "a": 2},
            rewards={"y": 1.0},
            agent_metrics={"turns": 3.0},
        )
        found.append(Received(10 + seed, 1000 + seed, delivery))
    failed = delivery_of(commit, (), status="failed", failure=Failure.of("init", "no room", "make some"), reward=None)
    return [*found, Received(20, 2000, structs.replace(failed, rollout_id="r9"))]


def test_every_sample_comes_back_from_parquet_as_it_was(new_session: Any, tmp_path: Path) -> None:
    received = some_deliveries(new_session)
    Cuts(tmp_path, "now", lambda _: None).open()
    Cuts(tmp_path, "now", lambda _: None).write(1, 20, received)
    samples = [sample for each in received for sample in each.delivery.samples]
    assert len(samples) > 4
    for sample in samples:
        assert find_samples(tmp_path, sample.sample_id) == [sample]
    rollout = received[1].delivery
    assert find_samples(tmp_path, rollout.rollout_id) == list(rollout.samples)


def test_the_files_say_their_schema_and_are_compressed(new_session: Any, tmp_path: Path) -> None:
    Cuts(tmp_path, "now", lambda _: None).open()
    Cuts(tmp_path, "now", lambda _: None).write(1, 20, some_deliveries(new_session))
    for path, schema in (
        (tmp_path / "run=run" / "part-1-20.parquet", SAMPLES_SCHEMA),
        (tmp_path / "rollouts" / "run=run" / "part-1-20.parquet", ROLLOUTS_SCHEMA),
    ):
        file = pq.ParquetFile(path)
        assert file.schema_arrow.remove_metadata().names == schema.names
        assert file.schema_arrow.metadata[b"schema_version"] == b"1"
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_columns_that_a_trainer_filters_by(new_session: Any) -> None:
    received = some_deliveries(new_session)
    table = samples_table(received).to_pylist()
    samples = [sample for each in received for sample in each.delivery.samples]
    for row, sample in zip(table, samples, strict=True):
        mask = sample.loss_mask.tolist()
        trained = [version for version, on in zip(sample.policy_versions, mask, strict=True) if on]
        assert row["tokens"] == len(row["token_ids"]) == len(mask)
        assert row["trained_tokens"] == sum(mask)
        assert (row["min_policy_version"], row["max_policy_version"]) == (min(trained), max(trained))
        assert row["timings"]["evaluated_ms"] == 30
    rollouts = rollouts_table(received).to_pylist()
    assert [row["status"] for row in rollouts] == ["completed"] * 4 + ["failed"]
    assert (rollouts[-1]["failure_kind"], rollouts[-1]["failure_retryable"]) == ("init", True)
    assert rollouts[-1]["reward"] is None
    assert rollouts[0]["metrics"] == [("a", 2.0), ("b", 1.5)]
    assert rollouts[0]["rewards"] == [("y", 1.0)]
    assert rollouts[0]["agent_metrics"] == [("turns", 3.0)]
    assert rollouts[1]["sample_ids"] == [sample.sample_id for sample in received[1].delivery.samples]


def test_every_field_of_a_sample_is_a_column() -> None:
    assert set(Sample.__struct_fields__) <= set(SAMPLES_SCHEMA.names)


def test_the_documentation_names_every_column() -> None:
    text = (Path(__file__).parents[2] / "docs" / "samples.md").read_text()
    assert describe(SAMPLES_SCHEMA) in text
    assert describe(ROLLOUTS_SCHEMA) in text


def test_sql_sees_both_tables_and_plain_duckdb_reads_the_files(new_session: Any, tmp_path: Path) -> None:
    received = some_deliveries(new_session)
    Cuts(tmp_path, "now", lambda _: None).open()
    Cuts(tmp_path, "now", lambda _: None).write(1, 20, received)
    names, rows = query(tmp_path, "SELECT status, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1")
    assert names == ["status", "n"]
    assert rows == [("completed", 4), ("failed", 1)]
    joined = "SELECT sum(s.trained_tokens) FROM samples s JOIN rollouts r USING (run, rollout_id) WHERE r.reward > 0"
    trained = sum(sample.loss_mask.tolist().count(1) for each in received[1:] for sample in each.delivery.samples)
    assert query(tmp_path, joined)[1] == [(trained,)]
    assert query(tmp_path, "SELECT metadata->>'$.b' FROM samples LIMIT 1")[1] == [("1",)]
    ids = query_arrow(tmp_path, "SELECT token_ids FROM samples ORDER BY stream_seq, branch")
    assert ids.column(0)[0].as_py() == received[0].delivery.samples[0].token_ids.tolist()
    plain = duckdb.sql(f"SELECT count(*) FROM '{tmp_path}/run=*/part-*.parquet'").fetchall()
    assert plain == [(sum(len(each.delivery.samples) for each in received),)]
