from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.pipeline.arrow_schema import ROLLOUTS_SCHEMA, SAMPLES_SCHEMA
from rollyard.pipeline.datasets import find_samples, query
from rollyard.schemas.errors import ConfigError


def put(folder: Path, name: str, **columns: list[object]) -> None:
    path = folder / "run=r" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_folder_has_typed_empty_tables(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "none"
    for table, schema in (("samples", SAMPLES_SCHEMA), ("rollouts", ROLLOUTS_SCHEMA)):
        names, rows = query(folder, f"SELECT * FROM {table}")
        assert names == schema.names
        assert rows == []
    types = dict(query(folder, "SELECT column_name, column_type FROM (DESCRIBE samples)")[1])
    assert types["token_ids"] == "UINTEGER[]"
    assert types["reward"] == "DOUBLE"
    assert find_samples(folder, "s") == []


def test_files_of_an_older_release_lack_columns_not_rows(tmp_path: Path) -> None:
    put(tmp_path, "part-1-2.parquet", sample_id=["s1"], reward=[0.5])
    put(tmp_path, "part-3-4.parquet", sample_id=["s2"], reward=[None], model=["m"])
    assert query(tmp_path, "SELECT sample_id, reward, model, tokens FROM samples ORDER BY 1")[1] == [
        ("s1", 0.5, None, None),
        ("s2", None, "m", None),
    ]


def test_only_finished_parts_are_read(tmp_path: Path) -> None:
    put(tmp_path, "part-1-2.parquet", sample_id=["s1"])
    aside = tmp_path / "_tmp" / "3-ab"
    aside.mkdir(parents=True)
    (aside / "samples-r.parquet").write_bytes(b"PAR1 half a file")
    assert query(tmp_path, "SELECT sample_id FROM samples")[1] == [("s1",)]


def test_a_folder_name_is_not_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "it's [a] *folder?"
    put(folder, "part-1-2.parquet", sample_id=["s1"])
    assert query(folder, "SELECT sample_id FROM samples")[1] == [("s1",)]


@pytest.mark.parametrize(
    "sql",
    [
        "COPY samples TO '{folder}/stolen.parquet'",
        "CREATE TABLE mine AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SET threads = 1",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_text('{folder}/../outside')",
        "SELECT nothing FROM samples",
        "SELEC",
        "",
        "SELECT CAST('x' AS INTEGER)",
    ],
)
def test_sql_that_is_wrong_writes_or_leaves_the_folder_is_refused(tmp_path: Path, sql: str) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    (tmp_path / "outside").write_text("secret")
    with pytest.raises(ConfigError) as caught:
        query(folder, sql.format(folder=folder))
    assert "samples and rollouts" in caught.value.hint
    assert list(folder.iterdir()) == []
