from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.tokens.decoder import IncrementalDecoder, StopStrings
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.packed import TokenIds


def portions(items: str | list[int], cuts: list[int]) -> list[str | list[int]]:
    """The items cut at these places."""
    places = sorted({min(cut, len(items)) for cut in cuts} | {0, len(items)})
    return [items[start:end] for start, end in itertools.pairwise(places)]


@given(ids=st.lists(st.integers(0, 420)), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_any_portions_of_ids_give_the_same_text(
    tokenizer: TextTokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    decoder = IncrementalDecoder(tokenizer, skip_special=skip)

    text = "".join(decoder.push(portion) for portion in portions(ids, cuts)) + decoder.flush()  # type: ignore[arg-type]

    assert text == tokenizer.decode(TokenIds.of(ids), skip)


@given(text=st.text(st.characters(codec="utf-8")))
def test_half_characters_are_held_back(tokenizer: TextTokenizer, text: str) -> None:
    decoder = IncrementalDecoder(tokenizer)
    seen = ""
    for number in tokenizer.encode_plain(text):
        seen += decoder.push([number])
        assert text.startswith(seen)
    assert seen == text
    assert decoder.flush() == ""


def test_a_character_that_never_ends_is_replaced(tokenizer: TextTokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    first = tokenizer.encode_plain("😀")[0]
    assert decoder.push([first]) == ""
    assert decoder.flush() == "\ufffd"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The meaning of stop strings, character by character."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab\n", max_size=12)


@given(text=letters, stops=st.lists(st.text("ab\n", max_size=4), max_size=3), cuts=st.lists(st.integers(0, 12)))
def test_any_portions_of_text_are_cut_at_the_same_place(text: str, stops: list[str], cuts: list[int]) -> None:
    splitter = StopStrings(stops)
    released = ""
    for portion in portions(text, cuts):
        released += splitter.push(str(portion))
        assert first_stop(text, stops)[0].startswith(released)

    assert (released + splitter.flush(), splitter.matched) == first_stop(text, stops)


@pytest.mark.parametrize(("text", "seen"), [("hello", "hello"), ("hello\nOb", "hello"), ("helloO", "helloO")])
def test_only_a_possible_start_is_held_back(text: str, seen: str) -> None:
    assert StopStrings(["\nObservation"]).push(text) == seen


def test_nothing_comes_after_a_stop_string() -> None:
    splitter = StopStrings(["END"])
    assert [splitter.push(text) for text in ("a EN", "D b", "c")] == ["a ", "", ""]
    assert splitter.flush() == ""
    assert splitter.matched == "END"
