"""The messages of msgspec about a wrong value, in the words of whoever wrote the value.

`Expected `int` >= 1 - at `$.group_size`` becomes `group_size: must be an integer >= 1, is 0`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct, structs

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`\Z", re.DOTALL)
_INVALID: Final = re.compile(r"Invalid enum value ")
_MISSING: Final = re.compile(r"Object missing required field `(.*)`\Z")
_TYPES: Final = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_SHOWN_CHARS: Final = 60
TOO_DEEP: Final = "nested too deeply; keep it under 500 levels"


def explain(error: Exception, raw: Any, kind: type[Struct]) -> str:
    """`field: what is wrong` for an error that converting `raw` to `kind` gave."""
    if isinstance(error, RecursionError):
        return TOO_DEEP
    what, _, where = str(error).partition(" - at ")
    if where.startswith("`key`"):
        where = where.removeprefix("`key` in ")
        what = "Expected `str` as every key"
    field, value = _locate(where.strip("`").removeprefix("$").removeprefix("."), raw)
    if unknown := _UNKNOWN.match(what):
        name = unknown[1]
        return f"{_join(field, name[:_SHOWN_CHARS])}: unknown field; {_suggest(name, field, kind)}"
    if missing := _MISSING.match(what):
        return f"{_join(field, missing[1])}: is missing; it is required"
    if _INVALID.match(what):
        return f"{field}: must be one of {', '.join(_choices(field, kind))}, is {_short(value)}"
    return f"{field}: {_expected(what, value)}" if field else f"a task {_expected(what, value)}"


def _expected(what: str, value: Any) -> str:
    wanted = re.sub(r", got `[^`]*`\Z", "", what).removeprefix("Expected ")
    if wanted == "`str` of length >= 1":
        return "must not be empty"
    wanted = re.sub(r"`([^`]*)`", lambda match: " or ".join(_TYPES.get(t, t) for t in match[1].split(" | ")), wanted)
    wanted = re.sub(r"(\d)\.0\b", r"\1", wanted)
    if "of length" in wanted and hasattr(value, "__len__"):
        return f"must be {wanted}, has {len(value)}"
    return f"must be {wanted}, is {_short(value)}"


def _locate(path: str, raw: Any) -> tuple[str, Any]:
    """The path in the user's words and the value that stands there. `[...]` is some value of a dictionary of texts."""
    words, value = "", raw
    for name, index in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        if name:
            words, value = _join(words, name), value.get(name) if isinstance(value, Mapping) else None
        elif index == "..." and isinstance(value, Mapping):
            key = next((key for key, item in value.items() if not isinstance(item, str)), None)
            words, value = f"{words}[{_short(key)}]", value.get(key)
        else:
            words = f"{words}[{index}]"
            value = value[int(index)] if index.isdigit() and isinstance(value, list | tuple) else None
    return words, value


def _suggest(name: str, where: str, kind: type[Struct]) -> str:
    known = _known_fields(kind)
    here = known.get(re.sub(r"\[\d+\]", "[]", where), ())
    if near := difflib.get_close_matches(name, here, 1):
        return f"did you mean `{_join(where, near[0])}`?"
    everywhere = {field: _join(path, field) for path, fields in known.items() for field in fields}
    if near := difflib.get_close_matches(name, everywhere, 1, 0.8):
        return f"did you mean `{everywhere[near[0]]}`?"
    return f"known here are {', '.join(here)}"


def _known_fields(kind: type[Struct], path: str = "") -> dict[str, tuple[str, ...]]:
    """The fields of a struct and of every struct inside it, by path; `[]` stands for any index."""
    found = {path: tuple(field.encode_name for field in structs.fields(kind))}
    for field in structs.fields(kind):
        here = _join(path, field.encode_name)
        for inner in _inside(field.type):
            items = [item for arg in get_args(inner) for item in _inside(arg)]
            for struct, at in ((inner, here), *((item, f"{here}[]") for item in items)):
                if isinstance(struct, type) and issubclass(struct, Struct):
                    found |= _known_fields(struct, at)
    return found


def _inside(hint: Any) -> list[Any]:
    """A type, or those that a union or an annotation is made of."""
    if get_origin(hint) is Annotated:
        return _inside(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [inner for part in get_args(hint) for inner in _inside(part)]
    return [hint]


def _choices(field: str, kind: type[Struct]) -> list[str]:
    """The texts that a field, or each item of it, may be."""
    here: list[Any] = [kind]
    for name in re.sub(r"\[[^\]]*\]", "", field).split("."):
        known = [part for part in here if isinstance(part, type) and issubclass(part, Struct)]
        types = [each.type for part in known for each in structs.fields(part) if each.encode_name == name]
        here = [inner for hint in types for inner in _inside(hint)]
    items = [inner for part in here for item in get_args(part) for inner in _inside(item)]
    literals = [part for part in here + items if get_origin(part) is Literal]
    return [json.dumps(text) for part in literals for text in get_args(part)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
