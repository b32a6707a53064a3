from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.engines import sse
from rollyard.gateway.engines.sse import EventReader

STREAM = (
    b": a comment\r\n\r\n"
    b'data: {"a": 1}\r\n\r\n'
    b'id: 7\nevent: x\nretry: 5\ndata:{"b": 2}\n\n'
    b"data: first\ndata:  second\ndata\n\n"
    b"data:\n\n"
    b"error: broken\r\r"
    b"data: caf\xc3\xa9 \xff\n\n"
    b"data: [DONE]\n\n"
    b"data: never\n\n"
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"first\n second\n", b"broken", b"caf\xc3\xa9 \xff"]


def read(blocks: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for block in blocks for event in reader.feed(block)]


def test_the_fields_of_a_stream() -> None:
    reader = EventReader()
    assert reader.feed(STREAM) == EVENTS
    assert reader.done


def test_a_stream_split_anywhere_is_the_same() -> None:
    for at in range(len(STREAM) + 1):
        assert read([STREAM[:at], STREAM[at:]]) == EVENTS, at
    assert read([bytes([byte]) for byte in STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM))), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_a_stream_split_at_many_places_with_any_line_ends(places: list[int], newline: bytes) -> None:
    stream = STREAM.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", newline)
    cuts = [0, *sorted(places), len(stream)]
    assert read([stream[start:end] for start, end in itertools.pairwise(cuts)]) == EVENTS


def test_an_event_that_was_not_ended_is_none() -> None:
    assert read([b"data: a\n\ndata: b\n"]) == [b"a"]


def test_lines_may_be_long_but_not_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    long = b"x" * (3 << 20)
    assert read([b"data: ", long, long, b"\n\n"]) == [long + long]
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100)
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        read([b"x" * 99, b"x" * 99])
