from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.keys import SessionGrant, sign, verify
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.task import Sampling

grants = st.builds(
    SessionGrant,
    run=st.text(min_size=1, max_size=40),
    rollout_id=st.from_regex(r"[A-Za-z0-9_=-]{1,40}", fullmatch=True),
    attempt=st.integers(1, 100),
    model=st.text(max_size=20),
    sampling=st.builds(Sampling, temperature=st.none() | st.floats(0, 10), seed=st.none() | st.integers(0, 2**31)),
    max_calls=st.none() | st.integers(1, 1000),
    max_tokens=st.none() | st.integers(1, 10**6),
    training=st.booleans(),
)


@given(grants, st.binary(min_size=16))
def test_a_key_gives_its_grant_back_and_fits_everywhere(grant: SessionGrant, secret: bytes) -> None:
    key = sign(grant, secret)
    assert verify(key, secret) == grant
    assert sign(grant, secret) == key
    assert key.startswith("ry-")
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@given(grants, st.data())
def test_a_changed_key_is_refused(grant: SessionGrant, data: st.DataObject) -> None:
    key = sign(grant, b"secret")
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != key[place]))
    with pytest.raises(Refusal, match="not accepted"):
        verify(key[:place] + other + key[place + 1 :], b"secret")


@given(grants)
def test_a_key_of_another_installation_is_refused(grant: SessionGrant) -> None:
    with pytest.raises(Refusal, match="signature is wrong") as caught:
        verify(sign(grant, b"theirs"), b"ours")
    assert caught.value.status == 401


@pytest.mark.parametrize("key", ["", "ry-", "ry-.", "sk-abc", "r0123", "ry-äöü.x", "ry-a.b.c"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(Refusal) as caught:
        verify(key, b"secret")
    assert caught.value.code == "invalid_api_key"


def test_a_rollout_id_that_is_no_part_of_a_subject_is_refused() -> None:
    for rollout_id in ("a.b", "", "*", "a b", "x" * 65):
        with pytest.raises(Refusal, match="is no rollout id"):
            verify(sign(SessionGrant(run="r", rollout_id=rollout_id, attempt=1), b"s" * 16), b"s" * 16)
