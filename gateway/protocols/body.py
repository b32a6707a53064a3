"""A request body read: JSON bytes into a struct. Every protocol reads through here, so all refuse in the same words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from functools import cache
from typing import Any, Final, NoReturn, TypeVar, cast

import msgspec
from msgspec import Struct

from rollyard.gateway.refusal import Refusal

T = TypeVar("T")

MAX_DEPTH: Final = 128
"""Levels of nesting. Tool schemas have some twenty; what is deeper breaks code further on that recurses."""

MAX_TOOLS: Final = 4096
MAX_MESSAGES: Final = 50_000
_LISTS: Final = {"tools": MAX_TOOLS, "messages": MAX_MESSAGES, "input": MAX_MESSAGES}
"""Lists of a body and the most that they may hold: some work is done for each item while all other agents wait."""

_CONTAINERS: Final = frozenset({dict, list})
_HALF: Final = re.compile("[\ud800-\udfff]")
_MAY_HOLD_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_AT: Final = re.compile(r" in `\$\.?([^`]*)`| at `\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def decode_body(body: bytes, kind: type[T]) -> T:
    """Read a body as `kind`, a struct or `dict[str, Any]`.

    Numbers may be strings, unknown fields of a struct are left out, of equal keys the last one counts. Half of a
    surrogate pair becomes U+FFFD: agents in JavaScript cut strings between the two halves of an emoji and send
    `\\ud83d`; those in Python send `\\udcff` for a byte that was no UTF-8. Neither can be encoded.

    Raises Refusal (400), naming the field where there is one: no JSON, another type, NaN, Infinity, too deep.
    """
    try:
        parsed = _read(body, kind)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise _refusal(str(error) if body else "it is empty") from error
    for name, most in _LISTS.items():
        value = parsed.get(name) if isinstance(parsed, dict) else getattr(parsed, name, None)
        if isinstance(value, list) and len(value) > most:
            raise Refusal(400, "invalid_request", f"`{name}` has {len(value)} items, the most is {most}", param=name)
    if _deeper_than(parsed, MAX_DEPTH):
        raise _too_deep()
    _refuse_endless(parsed)
    return parsed


def convert_body(raw: dict[str, Any], kind: type[T]) -> T:
    """The same from a body that is a `dict` already. Raises Refusal (400)."""
    try:
        parsed = msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    _refuse_endless(parsed)
    return parsed


def _read(body: bytes, kind: type[T]) -> T:
    try:
        parsed: T = _decoder(cast(Hashable, kind)).decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not _MAY_HOLD_HALF.search(body):
            raise
    else:
        return parsed
    value = json.loads(body.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    repaired: T = _decoder(cast(Hashable, kind)).decode(_HALF.sub("\N{REPLACEMENT CHARACTER}", text).encode())
    return repaired


@cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refusal(what: str) -> Refusal:
    """`what` is in msgspec's words, from which the field is taken."""
    at, missing = _AT.search(what), _MISSING.search(what)
    names = [at and (at[1] or at[2]), missing and missing[1]]
    param = ".".join(name for name in names if name)
    hint = "" if param else "send a JSON object in UTF-8; NaN and Infinity are not JSON"
    return Refusal(
        400, "invalid_request", f"the request body is not acceptable: {what}", hint=hint, param=param or None
    )


def _too_deep() -> Refusal:
    return Refusal(
        400,
        "invalid_request",
        f"the request body is nested too deeply: more than {MAX_DEPTH} levels",
        hint="flatten it",
    )


def _deeper_than(parsed: Any, limit: int) -> bool:
    """Whether lists and objects stand in each other more than `limit` levels deep. By level, so it does not recurse."""
    level = [msgspec.structs.astuple(parsed) if isinstance(parsed, Struct) else parsed]
    for _ in range(limit):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def _refuse_endless(parsed: Any) -> None:
    """A number written as a string may be "nan" or "inf"."""
    if not isinstance(parsed, Struct):
        return
    for name in parsed.__struct_fields__:
        value = getattr(parsed, name)
        for number in value.values() if isinstance(value, dict) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise Refusal(400, "invalid_request", f"`{name}` is {number}, it must be a finite number", param=name)
