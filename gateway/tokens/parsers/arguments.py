"""Arguments of tool calls: JSON taken apart without rewriting it, and plain text typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from rollyard.gateway.tokens.parsers.parser import ToolCall
from rollyard.schemas.call import Message

_BLANKS: Final = " \t\r\n"
_NAMES: Final = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "dict": "object"}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder: Final = json.JSONDecoder(parse_constant=_refuse)


def members(text: str) -> dict[str, str] | None:
    """Members of a JSON object, values as they are written; None when the text is not one whole object."""
    try:
        found, end = _parts(text, _skip(text, 0), "{}")
    except (ValueError, RecursionError):
        return None
    return {whole(key or ""): value for key, value in found} if end == len(text) else None


def items(text: str) -> list[str] | None:
    """Items of a JSON list as they are written; None when the text is not one whole list."""
    try:
        found, end = _parts(text, _skip(text, 0), "[]")
    except (ValueError, RecursionError):
        return None
    return [value for _, value in found] if end == len(text) else None


def sequence(text: str, dividers: str) -> list[str] | None:
    """JSON values one after another, with one divider between or none; None when there is anything else."""
    found: list[str] = []
    at = _skip(text, 0)
    try:
        while at < len(text):
            _, end = _decoder.raw_decode(text, at)
            found.append(text[at:end])
            at = _skip(text, end)
            if text[at : at + 1] in dividers:
                at = _skip(text, at + 1)
    except (ValueError, RecursionError):
        return None
    return found


def is_object(text: str) -> bool:
    """Whether the text is one whole JSON object."""
    return members(text) is not None


def json_call(text: str) -> ToolCall | None:
    """A call written as `{"name": ..., "arguments": {...}}`, or with `parameters`; None when it is none."""
    found = members(text)
    name = _text(found.get("name", "null")) if found is not None else None
    if found is None or not name:
        return None
    arguments = found.get("arguments", found.get("parameters", "{}"))
    if arguments == "null":
        arguments = "{}"
    # Some models put the object into a string.
    inner = _text(arguments)
    return ToolCall(name, arguments if inner is None else inner, _text(found.get("id", "null")) or "")


def typed(name: str, arguments: Iterable[tuple[str, str]], tools: Sequence[Message]) -> str:
    """Arguments that came as plain text, as a JSON object: each of the type that the tool's schema says."""
    schema = _parameters(name, tools)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    values = {key: _json_value(text, properties.get(key), schema) for key, text in arguments}
    return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in values.items()) + "}"


def whole(text: str) -> str:
    """JSON can escape half a surrogate pair, which has no UTF-8: it becomes U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parts(text: str, at: int, brackets: str) -> tuple[list[tuple[str | None, str]], int]:
    """Members or items of the value at `at`, and where the blanks behind it end. Raises ValueError."""
    opening, closing = brackets[0], brackets[1]
    found: list[tuple[str | None, str]] = []
    at = _expect(text, at, opening)
    if text.startswith(closing, at):
        return found, _skip(text, at + 1)
    while True:
        key = None
        if opening == "{":
            key, at = _decoder.raw_decode(text, at)
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            at = _expect(text, _skip(text, at), ":")
        _, end = _decoder.raw_decode(text, at)
        found.append((key, text[at:end]))
        at = _skip(text, end)
        if text.startswith(closing, at):
            return found, _skip(text, at + 1)
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def _expect(text: str, at: int, character: str) -> int:
    if not text.startswith(character, at):
        raise ValueError(f"{character} was expected")
    return _skip(text, at + 1)


def _text(value: str) -> str | None:
    """The text of a JSON string; None for any other value."""
    return whole(json.loads(value)) if value.startswith('"') else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _parameters(name: str, tools: Sequence[Message]) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def _json_value(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """JSON text of one argument. Where the schema does not say otherwise, it is a string."""
    types = _types(schema, root)
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if not types or "string" in types:
        return _quoted(text)
    if "boolean" in types and bare in ("True", "False"):
        return bare.lower()
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return bare if _kind(value) & types else _quoted(text)


def _kind(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    named = schema.get("type")
    found = {_NAMES.get(one, one) for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            found |= _types(option, root, depth - 1)
    for value in schema["enum"] if isinstance(schema.get("enum"), list) else ():
        found |= _kind(value)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth - 1)
    return found
