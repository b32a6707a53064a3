from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from rollyard.gateway.protocols.body import MAX_DEPTH, convert_body, decode_body
from rollyard.gateway.refusal import Refusal


class Inner(Struct):
    name: str


class Body(Struct, kw_only=True):
    text: str = ""
    number: float | None = None
    weights: dict[str, float] | None = None
    inner: list[Inner] = []
    any: Any = None


def refusal(body: bytes, kind: Any = Body) -> Refusal:
    with pytest.raises(Refusal) as caught:
        decode_body(body, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (rb"a\ud83d", "a�"),  # what JSON.stringify("a😀".slice(0, 2)) gives
        (rb"\udcff b", "� b"),  # what json.dumps gives for a byte that was no UTF-8
        (rb"\ud800\ud800", "��"),
        (rb"\ude00\ud83d", "��"),
        (rb"\uD83D\uDE00 \ud83d", "\N{GRINNING FACE} �"),
        (b"a\xed\xa0\x80", "a�"),
        (rb"\\ud83d \ud83d", "\\ud83d �"),
        (b"\xf0\x9f\x98\x80 " + rb"\ud83d\n\"", '\N{GRINNING FACE} �\n"'),
    ],
)
def test_half_a_surrogate_pair_is_a_replacement_character(sent: bytes, text: str) -> None:
    body = b'{"text": "' + sent + b'", "number": "1.5"}'
    assert decode_body(body, Body) == Body(text=text, number=1.5)
    assert decode_body(body, dict[str, Any])["text"] == text


@given(st.text(st.characters() | st.characters(categories=["Cs"]), max_size=20))
def test_any_text_of_a_client_is_text_that_can_be_encoded(text: str) -> None:
    body = json.dumps({"text": text, "any": {text: [text]}}).encode()
    read = decode_body(body, Body)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert read.text == whole
    msgspec.json.encode(read)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"number": []}', "number", "Expected"),
        (b'{"inner": [{"name": "a"}, {"name": 1}]}', "inner[1].name", "got `int`"),
        (b'{"inner": [{}]}', "inner[0].name", "missing"),
        (b'{"weights": {"a": null}}', "weights[...]", "got `null`"),
        (b'{"number": 1e999}', "number", "out of range"),
        (b'{"number": "nan"}', "number", "`number` is nan"),
        (b'{"weights": {"a": "-Infinity"}}', "weights", "`weights` is -inf"),
        (rb'{"text": "\ud83d", "number": []}', "number", "Expected"),
        (b'{"number": NaN}', None, "NaN and Infinity are not JSON"),
        (b'{"any": {"a": [Infinity]}}', None, "NaN and Infinity are not JSON"),
        (rb'{"text": "\ud83d", "any": -Infinity}', None, "-Infinity is not JSON"),
        (rb'{"text": "\ud83d", "any": 1e999}', None, "not JSON compliant"),
        (b'{"text": "\xff"}', None, "UTF-8"),
        (b"", None, "it is empty"),
        (b"[]", None, "Expected `object`"),
        (b'{"text": "a"', None, "truncated"),
        (b"{} {}", None, "trailing"),
    ],
)
def test_what_is_refused_and_why(body: bytes, param: str | None, words: str) -> None:
    refused = refusal(body)
    assert refused.param == param
    assert words in str(refused)


@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 100_000])
@pytest.mark.parametrize("half", [b"", rb"\ud83d"])
@pytest.mark.parametrize("closed", [True, False])
def test_depth_bombs(pair: tuple[bytes, bytes], depth: int, half: bytes, closed: bool) -> None:
    end = pair[1] * depth + b"}" if closed else b""
    body = b'{"text": "' + half + b'", "any": ' + pair[0] * depth + b"1" + end
    for kind in (Body, dict[str, Any]):
        refused = refusal(body, kind)
        assert closed is False or "nested too deeply" in str(refused)


def test_depth_that_is_fine() -> None:
    depth = MAX_DEPTH - 1
    assert decode_body(b'{"any": ' + b"[" * depth + b"]" * depth + b"}", Body).any is not None
    wide = msgspec.json.encode({"any": [[]] * 1000, "inner": [{"name": "a"}] * 100})
    assert len(decode_body(wide, Body).inner) == 100


def test_of_equal_keys_the_last_one_counts() -> None:
    assert decode_body(b'{"text": "a", "text": "b"}', Body).text == "b"
    assert decode_body(rb'{"any": "\ud83d", "text": "a", "text": "b"}', Body).text == "b"


def test_a_body_in_two_steps() -> None:
    raw = decode_body(b'{"number": "2", "inner": [{"name": "a"}], "more": 1}', dict[str, Any])
    assert convert_body(raw, Body) == Body(number=2.0, inner=[Inner("a")])
    for wrong, param in (({"inner": [{}]}, "inner[0].name"), ({"number": "inf"}, "number")):
        with pytest.raises(Refusal) as caught:
            convert_body(wrong, Body)
        assert (caught.value.status, caught.value.param) == (400, param)


@given(st.binary())
def test_any_bytes(body: bytes) -> None:
    try:
        decode_body(body, Body)
    except Refusal as refused:
        assert refused.status == 400
