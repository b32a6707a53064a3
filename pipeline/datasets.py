"""SQL over Parquet files: DuckDB views `samples` and `rollouts` of the sink's, `events` of an archive's.

Columns: pipeline/arrow_schema.py and pipeline/archive/schema.py. Reading is safe while somebody writes: a file appears
under its final name whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa

from rollyard.pipeline.archive.schema import EVENTS_GLOB, EVENTS_SCHEMA
from rollyard.pipeline.arrow_schema import ROLLOUTS_SCHEMA, SAMPLES_SCHEMA
from rollyard.schemas import packed
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.sample import Sample

SAMPLES_GLOB: Final = "run=*/part-*.parquet"
ROLLOUTS_GLOB: Final = "rollouts/run=*/part-*.parquet"

_PACKED: Final = ("token_ids", "loss_mask", "logprobs", "policy_versions")
_GLOB_SIGN: Final = re.compile(r"[*?\[]")
_NESTED: Final = ("turns", "links", "drift")
_NEWER: Final = ("masked", "cut_tokens", "incomplete", "policy")
_TABLES: Final = "the tables are samples and rollouts, and events of archived runs"
_JSON: Final = ("messages", "tools", "params", "metadata")


def connect(folder: Path, archive: Path | None = None) -> duckdb.DuckDBPyConnection:
    """A connection with the views `samples` and `rollouts` of `folder`, and with `events` of an archive.

    They are typed also where there is no file yet. SQL on it reaches no file but those, and changes no setting.
    """
    tables = [(folder, "samples", SAMPLES_GLOB, SAMPLES_SCHEMA), (folder, "rollouts", ROLLOUTS_GLOB, ROLLOUTS_SCHEMA)]
    if archive is not None:
        tables.append((archive, "events", EVENTS_GLOB, EVENTS_SCHEMA))
    connection = duckdb.connect()
    allowed: set[str] = set()
    for root, name, glob, schema in tables:
        escaped = _GLOB_SIGN.sub(r"[\g<0>]", str(root.absolute()))
        allowed |= {str(root.absolute()), escaped}
        # The empty table gives every column, also where files of an older release lack the newest ones.
        connection.from_arrow(schema.empty_table()).create(f"no_{name}")
        source = f"SELECT * FROM no_{name}"
        if next(root.glob(glob), None) is not None:
            files = f"read_parquet({_quoted(f'{escaped}/{glob}')}, union_by_name = true, hive_partitioning = false)"
            source += f" UNION ALL BY NAME SELECT * FROM {files}"
        connection.execute(f"CREATE VIEW {name} AS {source}")
    connection.execute(f"SET allowed_directories = [{', '.join(map(_quoted, sorted(allowed)))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def query(
    folder: Path, sql: str, parameters: Sequence[object] = (), *, archive: Path | None = None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run one SELECT; returns (column names, rows). Raises ConfigError for SQL that fails or would write.

    `parameters` stand in the SQL as $1, $2 and so on. With an archive there is the table `events` too.
    """
    with _session(folder, archive) as connection:
        result = connection.execute(_one_select(connection, sql), list(parameters))
        return [column[0] for column in result.description], result.fetchall()


def query_arrow(folder: Path, sql: str) -> pa.Table:
    """The same as an Arrow table, for programs: token lists do not become Python numbers."""
    with _session(folder) as connection:
        found: Any = connection.sql(_one_select(connection, sql)).to_arrow_table()
    table: pa.Table = found
    return table


@contextmanager
def _session(folder: Path, archive: Path | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    try:
        with connect(folder, archive) as connection:
            yield connection
    except duckdb.Error as error:
        raise ConfigError(
            f"the query failed: {str(error).strip()}",
            hint=f"{_TABLES}; `DESCRIBE samples` tells the columns",
        ) from error


def _one_select(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ConfigError("one SELECT is allowed here, nothing else", hint=_TABLES)
    return statements[0]


def find_samples(folder: Path, identity: str, *, limit: int = 20) -> list[Sample]:
    """The samples whose sample_id or rollout_id begins with `identity`, in the order of their branches."""
    with _session(folder) as connection:
        found: Any = connection.sql(
            "SELECT * FROM samples WHERE starts_with(sample_id, $1) OR starts_with(rollout_id, $1) "
            "ORDER BY run, rollout_id, branch LIMIT $2",
            params=[identity, limit],
        ).to_arrow_table()
    return [_sample(found, row) for row in range(found.num_rows)]


def _sample(table: pa.Table, row: int) -> Sample:
    fields: dict[str, Any] = {}
    for name in Sample.__struct_fields__:
        value: Any = table.column(name)[row]
        if name in _PACKED:
            fields[name] = value.values.to_numpy(zero_copy_only=False).tobytes()
        elif name in _JSON:
            text = value.as_py()
            fields[name] = None if text is None else msgspec.json.decode(text)
        elif name in _NESTED:
            fields[name] = [_item(each) for each in value.as_py() or ()]
        else:
            # Files of an older release lack the newest columns.
            fields[name] = value.as_py()
    known = {name: value for name, value in fields.items() if value is not None or name not in _NEWER}
    return msgspec.convert(known, Sample, dec_hook=packed.from_wire)


def _item(found: dict[str, Any]) -> dict[str, Any]:
    """An item of a nested column as the struct's fields."""
    if found.get("params") is not None:
        found["params"] = msgspec.json.decode(found["params"])
    for name in ("expected", "found"):
        if name in found:
            found[name] = packed.TokenIds.of(found[name] or ()).data
    return found
