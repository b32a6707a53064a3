"""Small settings in a file of their own, TOML or JSON, decoded into one struct."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from rollyard.pipeline.fieldwords import explain
from rollyard.schemas.errors import ConfigError

S = TypeVar("S", bound=Struct)


def read_spec(path: Path, kind: type[S]) -> S:
    """The struct in a file; one that begins with `{` is JSON, any other TOML.

    Raises ConfigError that names the file, and the field that is wrong with how to mend it.
    """
    try:
        text = path.read_text("utf-8").removeprefix("\N{BYTE ORDER MARK}").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(f"cannot read {path}: {reason}", hint="is the path right?") from error
    raw = _parse(path, text)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: holds no object", hint=f"its fields are {_fields(kind)}")
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path}: {explain(error, raw, kind)}", hint=f"its fields are {_fields(kind)}") from error


def _parse(path: Path, text: str) -> Any:
    as_json = text.startswith("{")
    try:
        return json.loads(text) if as_json else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: malformed {'JSON' if as_json else 'TOML'}: {error}",
            hint="a file that begins with { is read as JSON, any other as TOML",
        ) from error


def _fields(kind: type[Struct]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
