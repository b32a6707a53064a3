from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.pipeline.codec import decode, encode, encode_json
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions

ids = st.lists(st.integers(0, 2**32 - 1), max_size=50)


class Holder(msgspec.Struct):
    tokens: TokenIds
    logprobs: Logprobs


@given(ids)
def test_behaves_like_the_list(items: list[int]) -> None:
    packed = TokenIds.of(items)
    assert list(packed) == items
    assert len(packed) == len(items)
    assert np.asarray(packed).tolist() == items
    assert TokenIds(packed.data) == packed


@given(ids, st.integers(-60, 60), st.integers(-60, 60), st.integers(1, 3))
def test_slices_like_the_list(items: list[int], start: int, stop: int, step: int) -> None:
    assert list(TokenIds.of(items)[start:stop:step]) == items[start:stop:step]


@given(ids, ids)
def test_joins_and_prefixes_like_the_list(left: list[int], right: list[int]) -> None:
    joined = TokenIds.of(left) + TokenIds.of(right)
    assert list(joined) == left + right
    assert joined.startswith(TokenIds.of(left))
    assert joined.startswith(TokenIds.of(right)) == ((left + right)[: len(right)] == right)


@given(ids, st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_survives_msgpack_and_json(tokens: list[int], logprobs: list[float]) -> None:
    holder = Holder(TokenIds.of(tokens), Logprobs.of(logprobs))
    assert decode(encode(holder), Holder) == holder
    assert decode(encode_json(holder), Holder) == holder


def test_index_and_bounds() -> None:
    packed = LossMask.of([1, 0, 1])
    assert (packed[0], packed[-1]) == (1, 1)
    with pytest.raises(IndexError):
        packed[3]


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(OverflowError):
        TokenIds.of([-1])
    with pytest.raises(ValueError, match="5 bytes"):
        Versions(b"12345")


def test_json_has_no_nan() -> None:
    back = decode(encode_json(Holder(TokenIds.of([1]), Logprobs.of([float("-inf")]))), Holder)
    assert np.isnan(np.asarray(back.logprobs)).tolist() == [True]
