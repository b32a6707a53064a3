"""Fields of a Messages request, checked: whatever is wrong with one, the refusal names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from rollyard.gateway.refusal import Refusal

T = TypeVar("T")
Block = dict[str, Any]

_NAMES: Final[dict[Any, str]] = {str: "a string", dict: "an object", list: "a list"}


def bad(field: str, why: str) -> Refusal:
    """400 for a field, for example `messages[0].content[1].text`."""
    return Refusal(400, "invalid_request", f"{field}: {why}", param=field)


def need(block: Mapping[str, Any], key: str, kind: type[T], field: str) -> T:
    """The value under `key` of an object that stands at `field`. Raises Refusal when it is of another kind."""
    value = block.get(key)
    if isinstance(value, kind):
        return value
    why = "it is missing" if key not in block else f"it must be {_NAMES[kind]}, not {_kind(value)}"
    raise bad(f"{field}.{key}" if field else key, why)


def objects(values: list[Any], field: str) -> list[Block]:
    """A list of objects. Raises Refusal."""
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise bad(f"{field}[{index}]", f"it must be an object, not {_kind(value)}")
    return values


def blocks(content: list[Any], field: str) -> list[Block]:
    """The blocks of a content, cache marks left out: they speak of the vendor's cache. Raises Refusal."""
    for index, block in enumerate(objects(content, field)):
        need(block, "type", str, f"{field}[{index}]")
    return [_unmarked(block) if "cache_control" in block else block for block in content]


def _unmarked(block: Block) -> Block:
    return {key: value for key, value in block.items() if key != "cache_control"}


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)
