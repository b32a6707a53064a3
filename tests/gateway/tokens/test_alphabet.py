"""SentencePiece's kind of BPE, with bytes to fall back on: equal to what the library does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollyard.gateway.tokens.decoder import IncrementalDecoder
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.packed import TokenIds

SPACE = "\u2581"
CORPUS = [
    "Having said hello, the user lists files and the answer is here.",
    "hello hello the answer",
    "def f(x): return x",
]
SPECIALS = ["<unk>", "<s>", "</s>"]


def trained(kind: str) -> Tokenizer:
    """As of Llama 2 (`prepend`), later conversions of it (`first`), or Gemma (`never`)."""
    prepend = [normalizers.Prepend(SPACE)] if kind == "prepend" else []
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learned.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    found = json.loads(learned.to_str())["model"]
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(0x100)), *found["vocab"]]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in found["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [] if kind == "never" else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return backend


LIBRARY = {kind: trained(kind) for kind in ("prepend", "first", "never")}
TOKENIZERS = {kind: TextTokenizer(trained(kind), eos_token="</s>") for kind in LIBRARY}
kinds = pytest.mark.parametrize("kind", LIBRARY)
texts = st.lists(st.sampled_from(["<s>", "</s>", " ", "  ", "hello", "é😀", "\n", "the answer", "[INST]", "<"])).map(
    "".join
)


@kinds
@example(text="<s> hello</s>hello")
@given(text=texts | st.text(st.characters(codec="utf-8", exclude_characters=SPACE)))
def test_rendered_text_encodes_as_the_library_does(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    expected = LIBRARY[kind].encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_rendered(text, "\ufdd0").tolist() == expected


@kinds
@given(text=texts | st.text(st.characters(codec="utf-8", exclude_characters=SPACE)))
def test_text_decodes_as_in_the_library(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = LIBRARY[kind].encode(text, add_special_tokens=False).ids
    decoder = IncrementalDecoder(tokenizer)

    expected = LIBRARY[kind].decode(ids, skip_special_tokens=True)

    assert tokenizer.decode(TokenIds.of(ids), True) == expected
    assert "".join(decoder.push([number]) for number in ids) + decoder.flush() == expected


@given(before=texts, after=texts)
def test_what_continues_other_text_is_encoded_as_within_it(before: str, after: str) -> None:
    """A prompt is continued behind a special token."""
    for tokenizer in TOKENIZERS.values():
        whole = tokenizer.encode_rendered(before + "</s>" + after, "")
        parts = tokenizer.encode_rendered(before + "</s>", ""), tokenizer.encode_rendered(after, "", continues=True)
        assert parts[0] + parts[1] == whole


@kinds
def test_splits_stand_for_the_same_bytes(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    split_ids = [number for number in range(tokenizer.vocab_size) if tokenizer.splits(number)]
    assert split_ids
    for number in split_ids:
        for pair in tokenizer.splits(number):
            assert b"".join(map(tokenizer.token_bytes, pair)) == tokenizer.token_bytes(number)


def without(part: str, value: Any) -> Tokenizer:
    backend = trained("never")
    setattr(backend, part, value)
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        without("decoder", decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])),
        without("decoder", None),
        without("normalizer", normalizers.NFKC()),
        without("pre_tokenizer", pre_tokenizers.Whitespace()),
        without("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Metaspace()])),
    ],
)
def test_what_does_more_than_is_known_is_refused(backend: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="neither byte-level nor SentencePiece BPE") as caught:
        TextTokenizer(backend)
    assert caught.value.hint
