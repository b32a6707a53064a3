from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from rollyard.gateway.engines.numbers import MAX_ID, ids_json, pack_logprobs, parse_ids, without_nan
from rollyard.schemas.packed import TokenIds

MANY = [1] * 300


@given(st.lists(st.integers(0, MAX_ID) | st.integers(0, 200_000)), st.sampled_from([0, 300]))
def test_ids_go_and_come_back(ids: list[int], more: int) -> None:
    packed = TokenIds.of([*ids, *range(more)])
    text = ids_json(packed)
    assert json.loads(bytes(text)) == packed.tolist()
    assert parse_ids(text) == packed


def test_the_table_of_digits() -> None:
    ids = TokenIds.of([*range(0, 10_000_000, 997), 999, 1000, 9_999_999])
    assert json.loads(bytes(ids_json(ids))) == ids.tolist()
    beyond = ids + TokenIds.of([10_000_000])
    assert json.loads(bytes(ids_json(beyond))) == beyond.tolist()


@pytest.mark.parametrize("bad", [None, -1, 1.5, MAX_ID + 1, 10**30, "1", True, [1], {}])
@pytest.mark.parametrize("before", [[], MANY], ids=["few", "many"])
def test_what_is_no_list_of_ids(bad: Any, before: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no id|natural|between|no list"):
        parse_ids(Raw(json.dumps([*before, bad, 7]).encode()))


def test_null_is_no_ids_and_an_empty_list_is_none() -> None:
    assert parse_ids(Raw(b" null ")) is None
    assert parse_ids(Raw(b"[]")) == TokenIds()
    assert parse_ids(Raw(json.dumps(MANY, indent=1).encode())) == TokenIds.of(MANY)


def test_logprobs_that_are_none_stay_in_place() -> None:
    packed = pack_logprobs([-0.5, None, -9999.0, -12345, math.inf, -3, "x", True, 1e300])
    assert [math.isfinite(value) for value in packed] == [True, False, False, False, False, True, False, False, False]


@given(st.dictionaries(st.text(), st.text() | st.lists(st.floats())))
def test_python_json_with_nan_can_be_read(value: dict[str, Any]) -> None:
    def strict(name: str) -> None:
        pytest.fail(f"{name} is left")

    read = json.loads(without_nan(json.dumps(value).encode()), parse_constant=strict)
    expected = {
        key: [x if math.isfinite(x) else None for x in item] if isinstance(item, list) else item
        for key, item in value.items()
    }
    assert read == expected
