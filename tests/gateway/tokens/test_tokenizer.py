from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer, load_tokenizer
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.packed import TokenIds

ESCAPE = "\ufdd0"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
tricky = st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|>", "<think>", "hello", "\n", " ", "é😀"])).map(
    "".join
)
any_text = st.text(st.characters(codec="utf-8")) | tricky


@given(text=any_text)
def test_plain_text_comes_back_and_holds_no_special_id(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)

    assert tokenizer.decode(ids, skip_special=True) == text
    assert tokenizer.special_ids.isdisjoint(ids)


@given(text=any_text)
def test_decoding_equals_the_librarys(tokenizer: TextTokenizer, tokenizer_folder: Path, text: str) -> None:
    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = library.encode(text).ids

    for skip in (True, False):
        assert tokenizer.decode(TokenIds.of(ids), skip) == library.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 650)))
def test_any_ids_decode_as_in_the_library(tokenizer: TextTokenizer, tokenizer_folder: Path, ids: list[int]) -> None:
    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))

    assert tokenizer.decode(TokenIds.of(ids), False) == library.decode(ids, skip_special_tokens=False)


@given(text=any_text)
def test_rendered_text_encodes_as_the_library_does(tokenizer: TextTokenizer, tokenizer_folder: Path, text: str) -> None:
    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))

    assert tokenizer.encode_rendered(text, ESCAPE).tolist() == library.encode(text, add_special_tokens=False).ids


@example(before="<|im_", text="end|>", after="")
@example(before="<", text="", after="|im_end|>")
@given(before=tricky, text=tricky, after=tricky)
def test_broken_specials_stay_text_whatever_stands_beside_them(
    tokenizer: TextTokenizer, before: str, text: str, after: str
) -> None:
    broken = [tokenizer.break_specials(part, ESCAPE) for part in (before, text, after)]
    ids = tokenizer.encode_rendered("".join(broken), ESCAPE)

    assert tokenizer.special_ids.isdisjoint(ids)
    assert ids == tokenizer.encode_plain(before + text + after)


def test_a_special_inside_a_special_is_broken_too() -> None:
    backend = Tokenizer(models.BPE({chr(code): code for code in range(0x21, 0x7F)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<a>", "<<a>", "xyx"])
    tokenizer = TextTokenizer(backend)

    for text in ("<<a>", "xyxyx", "<a>xyx"):
        broken = tokenizer.break_specials(text, ESCAPE)
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode_rendered(broken, ESCAPE))
        assert broken.replace(ESCAPE, "") == text


def test_specials_that_eat_blanks_do_as_in_the_library() -> None:
    def backend() -> Tokenizer:
        made = Tokenizer(models.BPE({chr(code): code for code in range(0x21, 0x7F)} | {"Ġ": 200}, []))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens([AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True)])
        return made

    tokenizer = TextTokenizer(backend())
    for text in ("a <l> b", "a <r> b", " <r> <l> ", "a<r><l>b"):
        assert tokenizer.encode_rendered(text, ESCAPE).tolist() == backend().encode(text).ids


def test_what_a_folder_says_is_read(tokenizer: TextTokenizer, tokenizer_folder: Path) -> None:
    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_ids == {tokenizer.specials["<|im_end|>"], tokenizer.specials["<|endoftext|>"]}
    assert tokenizer.chat_template is not None
    assert set(tokenizer.specials) == set(SPECIALS)


def test_a_file_is_read_with_the_files_beside_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("template of its own")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))

    loaded = load_tokenizer(tmp_path / "tokenizer.json")

    assert loaded.chat_template == "template of its own"
    assert loaded.eos_ids >= {7, 8}


def test_a_template_for_tools_is_used_where_there_are_tools(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    named = [{"name": "default", "template": "plain\n"}, {"name": "tool_use", "template": "tools\n"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))

    template = ChatTemplate(load_tokenizer(tmp_path).chat_template or "")

    assert template.render([{"role": "user", "content": "a"}], None, True) == "plain"
    assert template.render([{"role": "user", "content": "a"}], [{"type": "function"}], True) == "tools"


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end|>", "<|user|>"], {"<|end|>"}),
        (["<|end|>", "<|channel|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|user|>", "<|observation|>", "<|endoftext|>"], {"<|user|>", "<|observation|>", "<|endoftext|>"}),
    ],
)
def test_what_ends_a_turn_depends_on_the_family(names: list[str], ends: set[str]) -> None:
    backend = Tokenizer(models.BPE({chr(code): code for code in range(0x21, 0x7F)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    tokenizer = TextTokenizer(backend)
    assert {name for name in names if tokenizer.specials[name] in tokenizer.eos_ids} == ends


def test_a_folder_with_a_tiktoken_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"")
    with pytest.raises(ConfigError, match="tiktoken vocabulary") as caught:
        load_tokenizer(tmp_path)
    assert "convert it" in caught.value.hint


def test_half_a_surrogate_pair_is_a_replacement_character(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_plain("a\ud83d b"), False) == "a\ufffd b"


def test_leading_special(tokenizer: TextTokenizer) -> None:
    end = tokenizer.specials["<|im_end|>"]
    assert tokenizer.leading_special("<|im_end|>\nx") == (0, 10, end)
    assert tokenizer.leading_special("\n <|im_end|>x") == (2, 12, end)
    assert tokenizer.leading_special("x <|im_end|>", 1) == (2, 12, end)
    assert tokenizer.leading_special("x<|im_end|>") is None
    assert tokenizer.leading_special("") is None


def test_splits_stand_for_the_same_bytes(tokenizer: TextTokenizer) -> None:
    split_ids = [number for number in range(tokenizer.vocab_size) if tokenizer.splits(number)]

    assert len(split_ids) > 100
    for number in split_ids:
        for pair in tokenizer.splits(number):
            assert b"".join(map(tokenizer.token_bytes, pair)) == tokenizer.token_bytes(number)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("nothing.json", None, "no tokenizer at"),
        ("broken.json", "{", "cannot read"),
        ("broken.gguf", "GGUX", "does not start with GGUF"),
        ("empty.gguf", "", "cannot read the GGUF file"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_tokenizer(tmp_path / name)
    assert caught.value.hint


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.Metaspace()
    with pytest.raises(ConfigError, match="decodes with Metaspace: neither"):
        TextTokenizer(backend)


DRIFT = [
    ([56, 565, 274], "Having", [15432]),
    ([2797, 5365], "hello", [28120]),
    ([551, 23282, 102, 515], " unbelievable", [33282, 16275]),
    ([198, 198], "\n\n", [1116]),
    ([289, 5406], "    return", [333, 1003]),
]


@pytest.mark.model
@pytest.mark.parametrize(("sampled", "text", "again"), DRIFT)
def test_sampled_ids_are_not_what_their_text_encodes_to(
    model_tokenizer: TextTokenizer, sampled: list[int], text: str, again: list[int]
) -> None:
    assert model_tokenizer.decode(TokenIds.of(sampled), False) == text
    assert model_tokenizer.encode_plain(text).tolist() == again != sampled


@pytest.mark.model
def test_the_local_models_specials(model_tokenizer: TextTokenizer) -> None:
    assert model_tokenizer.vocab_size == 49152
    assert model_tokenizer.specials["<|im_end|>"] == 2
    assert 2 in model_tokenizer.eos_ids
    assert len(model_tokenizer.specials) == 17
    assert model_tokenizer.decode(TokenIds.of([34, 2]), skip_special=True) == "2"
