from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollyard.gateway.tokens.gguf_metadata import read_metadata
from rollyard.gateway.tokens.tokenizer import TextTokenizer, load_tokenizer
from rollyard.schemas.errors import ConfigError

gguf = pytest.importorskip("gguf")


def write_gguf(path: Path, tokenizer_folder: Path, pre: str) -> None:
    """The synthetic tokenizer as the `gguf` package writes it."""
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    added = {token["content"]: token for token in content["added_tokens"]}
    vocabulary = content["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [(3 if added[token]["special"] else 4) if token in added else 1 for token in tokens]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_chat_template("{{ messages }}")
    writer.add_float32("some.float", 0.5)
    writer.add_array("some.flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_reads_what_the_gguf_package_writes(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer_folder, "smollm")

    metadata = read_metadata(tmp_path / "m.gguf")

    assert metadata["general.architecture"] == "llama"
    assert metadata["some.float"] == 0.5
    assert metadata["some.flags"] == [True, False]
    assert metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_a_tokenizer_from_gguf_equals_its_tokenizer_json(
    tokenizer: TextTokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer_folder, "smollm")

    loaded = load_tokenizer(tmp_path / "m.gguf")

    assert loaded.specials == tokenizer.specials
    assert loaded.eos_ids == tokenizer.eos_ids
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.chat_template == "{{ messages }}"
    for text in ("Having hello 12 345\n\n  return", "<think>é😀<|im_end|>", '{"name": "bash"}'):
        assert loaded.encode_plain(text) == tokenizer.encode_plain(text)
        assert loaded.encode_rendered(text, "") == tokenizer.encode_rendered(text, "")


def test_an_unknown_pre_tokenizer_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer_folder, "deepseek-r1")
    with pytest.raises(ConfigError, match=r"deepseek-r1.*only smollm is known") as caught:
        load_tokenizer(tmp_path / "m.gguf")
    assert "tokenizer.json" in caught.value.hint


@pytest.mark.parametrize("size", [4, 12, 40, 5000])
def test_a_truncated_file_is_refused(tokenizer_folder: Path, tmp_path: Path, size: int) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer_folder, "smollm")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:size])
    with pytest.raises(ConfigError, match="cannot read the GGUF file"):
        read_metadata(tmp_path / "cut.gguf")
