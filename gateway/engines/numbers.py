"""Token ids and logprobs in the JSON of model servers. Pure.

A prompt holds up to hundreds of thousands of ids: both ways avoid a Python int for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np

from rollyard.schemas.packed import Logprobs, TokenIds

MAX_ID: Final = 0xFFFF_FFFF
_FEW_IDS = 256
_FEW_BYTES = 512
# vLLM writes this where a logprob is minus infinity.
_FLOOR: Final = -9999.0
_NOT_JSON: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b')

# Four digits of an id each. Before the first digit of a number JSON takes blanks, but no zeros.
_TABLED_IDS: Final = 10_000_000
_HIGH: Final = np.array([b"    ", *(b"%4d" % n for n in range(1, _TABLED_IDS // 1000))]).view("<u4")
_LOW: Final = np.array([*(b"%3d," % n for n in range(1000)), *(b"%03d," % n for n in range(1000))]).view("<u4")


def ids_json(ids: TokenIds) -> msgspec.Raw:
    """Ids as a JSON list."""
    numbers = np.asarray(ids)
    if len(numbers) < _FEW_IDS or int(numbers.max()) >= _TABLED_IDS:
        return msgspec.Raw(msgspec.json.encode(ids.tolist()))
    high, low = np.divmod(numbers, np.uint32(1000))
    digits = np.empty((len(numbers), 2), dtype="<u4")
    digits[:, 0] = _HIGH[high]
    digits[:, 1] = _LOW[low + (high > 0) * np.uint32(1000)]
    return msgspec.Raw(b"[" + digits.tobytes()[:-1] + b"]")


def parse_ids(raw: msgspec.Raw) -> TokenIds | None:
    """A JSON list of ids, packed; None for null. Raises ValueError when it is anything else."""
    if len(memoryview(raw)) <= 4:  # null, or nothing
        return None if bytes(raw).strip() in (b"", b"null") else pack_ids(msgspec.json.decode(raw))
    text = bytes(raw).strip()
    if text == b"null":
        return None
    if len(text) < _FEW_BYTES:
        return pack_ids(msgspec.json.decode(text))
    if text.translate(None, b"0123456789, \t\r\n") != b"[]":
        raise ValueError("it is no list of natural numbers")
    numbers = np.fromstring(text[1:-1].decode(), dtype=np.int64, sep=",")
    if len(numbers) != text.count(b",") + 1 or int(numbers.max()) > MAX_ID:
        raise ValueError("an id is not between 0 and 2^32")
    return TokenIds(numbers.astype("<u4").tobytes())


def pack_ids(values: Any) -> TokenIds:
    """Ids from decoded JSON. Raises ValueError when it is no list of ids."""
    if not isinstance(values, list):
        raise ValueError("it is no list")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_ID:
            raise ValueError(f"{value!r} is no id")
    return TokenIds.of(values)


def pack_logprobs(values: Iterable[Any]) -> Logprobs:
    """Logprobs from decoded JSON. What is no number, and what stands for minus infinity, is not finite in the result.

    No caller can take such a value for a logprob, and none is dropped: lengths stay comparable.
    """
    values = list(values)
    if all(type(value) is float for value in values) and (not values or _FLOOR < min(values) <= max(values) <= 0.0):
        return Logprobs.of(values)
    return Logprobs.of(map(_logprob, values))


def _logprob(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        return float("nan")
    return value if _FLOOR < value < 3e38 else float("-inf")


def without_nan(event: bytes) -> bytes:
    """JSON with null in place of NaN and infinities, which Python servers write though JSON has none."""
    return _NOT_JSON.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", event)
