"""Rows of a table, JSONL or Parquet, with their numbers from 1."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollyard.schemas.errors import TaskError

Row = Mapping[str, Any]


def read_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Each row with its number, or a text that says why it is none. For JSONL the number is the line's.

    A file is Parquet when its name says so, else JSON Lines. Raises TaskError for a file that cannot be read at all.
    """
    try:
        yield from _parquet(path) if path.suffix in (".parquet", ".pq") else _jsonl(path)
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or error}", hint="is the path right?") from error


def text_of(row: Row, column: str) -> str:
    """The text in a column. Raises ValueError that says what is there instead."""
    value = value_of(row, column)
    if not isinstance(value, str):
        raise ValueError(f"{column}: is {kind_of(value)}, not text")
    return value


def value_of(row: Row, column: str) -> Any:
    """What stands in a column. Raises ValueError when there is no such column, or nothing in it."""
    if column not in row:
        raise ValueError(f"{column}: there is no such column; columns are {', '.join(map(str, row)) or 'none'}")
    if row[column] is None:
        raise ValueError(f"{column}: is null")
    return row[column]


def list_of(row: Row, column: str) -> list[Any]:
    """A list in a column, or one written there as JSON. Raises ValueError."""
    value = value_of(row, column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{column}: is text that is no JSON list: {value[:60]!r}") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{column}: is {kind_of(value)}, not a list")
    return list(value)


def kind_of(value: object) -> str:
    """What a value is, in words of JSON."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _jsonl(path: Path) -> Iterator[tuple[int, Row | str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                yield number, f"is no JSON: {error}"
                continue
            yield number, row if isinstance(row, dict) else f"is {kind_of(row)}, not an object"


def _parquet(path: Path) -> Iterator[tuple[int, Row | str]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise TaskError(f"cannot read {path}: {error}", hint="is it a Parquet file?") from error
