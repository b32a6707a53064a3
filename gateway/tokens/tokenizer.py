"""Text to token ids and back, for BPE tokenizers that can write any bytes.

Two kinds of text: *plain* text comes from agents and users, and never becomes a special token; *rendered* text comes
from a chat template, and the special tokens in it are meant, except where an escape character breaks them.
"Special" is what the tokenizer marks so (`<|im_end|>`). Other added tokens (`<think>` in some models) are ordinary
text that happens to have one id: they are recognised everywhere, as model servers do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollyard.gateway.tokens.alphabet import alphabet_of
from rollyard.gateway.tokens.gguf_metadata import read_metadata
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.packed import TokenIds

# Names under which model families end a turn or a text. Configurations often list only one of the two.
_END_NAMES = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>"),
        *("<|return|>", "<|call|>", "</s>", "<eos>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_CACHED_PIECE_CHARS = 4096


class TextTokenizer:
    """One tokenizer. `specials` maps special-token text to its id; `eos_ids` end a turn; `chat_template` is Jinja.

    Raises ConfigError for a tokenizer that could not be told apart byte by byte.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        self.alphabet = alphabet_of(backend)
        # Without this the library turns special-token text into special ids wherever it stands.
        backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        # A name of one character cannot be broken by an escape, so it stays text.
        self.specials = {t.content: number for number, t in added.items() if t.special and len(t.content) > 1}
        self.special_ids = frozenset(self.specials.values())
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids = frozenset(eos_ids) | {self.specials[name] for name in _end_names(self.specials)}
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._backend = backend
        self._later = _without_prefix(backend) if self.alphabet.prefixes_start else backend
        self._bytes: dict[int, bytes] = {}
        # Longer names first, so that a name that starts another one does not win.
        names = sorted(self.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._eats_left = {token.content for token in added.values() if token.lstrip}
        self._eats_right = {token.content for token in added.values() if token.rstrip}
        self._prefixes = {text[:n] for text in self.specials for n in range(1, len(text))}
        self._firsts = {text[0] for text in self.specials}
        self._longest = max(map(len, self.specials), default=0)
        # Turns of a conversation come again in every later prompt, system prompts in every session.
        self._encode_short = lru_cache(maxsize=4096)(self._encode)

    def encode_plain(self, text: str, *, continues: bool = False) -> TokenIds:
        """Ids of untrusted text: special-token text in it is text. `continues`: ids stand before it."""
        encode = self._encode_short if len(text) <= _CACHED_PIECE_CHARS else self._encode
        return encode(text, continues)

    def encode_rendered(self, text: str, escape: str, *, continues: bool = False) -> TokenIds:
        """Ids of text from a chat template: special tokens are recognised, then `escape` characters removed."""
        data = []
        end, before = 0, ""
        for match in [*self._special.finditer(text), None]:
            piece = text[end : match.start() if match else None].replace(escape, "")
            piece = piece.lstrip() if before in self._eats_right else piece
            piece = piece.rstrip() if match and match[0] in self._eats_left else piece
            data.append(self.encode_plain(piece, continues=continues or end > 0).data)
            if match:
                data.append(TokenIds.of([self.specials[match[0]]]).data)
                end, before = match.end(), match[0]
        return TokenIds(b"".join(data))

    def break_specials(self, text: str, escape: str) -> str:
        """Put `escape` between the characters of every special name, and after an end that could begin one."""
        if not any(first in text for first in self._firsts):
            return text
        text = self._special.sub(lambda match: escape.join(match[0]) + escape, text)
        if any(text[-size:] in self._prefixes for size in range(1, min(self._longest, len(text) + 1))):
            text += escape
        return text

    def leading_special(self, text: str, start: int = 0) -> tuple[int, int, int] | None:
        """Start, end and id of the special that comes next, blanks aside; None when there is none."""
        rest = text[start:]
        match = self._special.match(text, len(text) - len(rest.lstrip()))
        return (match.start(), match.end(), self.specials[match[0]]) if match else None

    def find_specials(self, text: str) -> list[tuple[int, int, int]]:
        """Start, end and id of every special in a text."""
        return [(match.start(), match.end(), self.specials[match[0]]) for match in self._special.finditer(text)]

    def decode(self, ids: TokenIds, skip_special: bool) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD; ids without a token are nothing."""
        text = b"".join(self.token_bytes(number, skip_special) for number in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.alphabet.strips_space else text

    def token_bytes(self, number: int, skip_special: bool = False) -> bytes:
        """The bytes that one id stands for, often not whole characters."""
        if skip_special and number in self.special_ids:
            return b""
        found = self._bytes.get(number)
        if found is None:
            found = self._bytes[number] = self.alphabet.bytes_of(self._backend.id_to_token(number) or "")
        return found

    def splits(self, number: int) -> list[tuple[int, int]]:
        """Every pair of ordinary ids that together stand for the same bytes as one ordinary id."""
        token = self._backend.id_to_token(number)
        if token is None or number in self.special_ids or not self.alphabet.is_text(token):
            return []
        to_id = self._backend.token_to_id
        halves = ((to_id(token[:size]), to_id(token[size:])) for size in range(1, len(token)))
        return [(left, right) for left, right in halves if left is not None and right is not None]

    def _encode(self, text: str, continues: bool) -> TokenIds:
        if not text.isascii():
            # Agents cut strings inside a surrogate pair; what is left of it has no UTF-8.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        backend = self._later if continues else self._backend
        return TokenIds.of(backend.encode(text, add_special_tokens=False).ids)


def _without_prefix(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer for text that stands behind other text."""
    later: Tokenizer = Tokenizer.from_str(backend.to_str())
    state = json.loads(backend.pre_tokenizer.__getstate__())
    later.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=state.get("split", True))
    later.encode_special_tokens = True
    return later


def _end_names(specials: Collection[str]) -> frozenset[str]:
    """Names of special tokens that end a turn."""
    names = _END_NAMES
    if "<|channel|>" in specials:  # gpt-oss ends each of the several messages of a turn with <|end|>
        names -= {"<|end|>"}
    if "<|observation|>" in specials:  # GLM ends a turn with the mark of the next one
        names |= {"<|user|>", "<|observation|>"}
    return names & frozenset(specials)


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a GGUF file, a tokenizer.json with the files beside it, or a folder that holds one.

    Raises ConfigError when there is none, or its kind is not supported.
    """
    if path.suffix == ".gguf":
        return _from_gguf(path)
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not file.is_file() and list(folder.glob("*.tiktoken")) + list(folder.glob("tiktoken.model")):
        raise ConfigError(
            f"{folder} holds a tiktoken vocabulary and no tokenizer.json",
            hint="convert it with transformers (TikTokenConverter), or use a server that returns token ids itself",
        )
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer at {file}", hint="give a tokenizer.json, its folder, or a .gguf file")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises it bare for every broken file
        raise ConfigError(f"cannot read {file}: {error}", hint="give a complete tokenizer.json") from error
    settings = _json_beside(folder / "tokenizer_config.json")
    ends = _json_beside(folder / "generation_config.json").get("eos_token_id", [])
    eos_token = _token_text(settings.get("eos_token"))
    named = [backend.token_to_id(eos_token)] if eos_token else []
    return TextTokenizer(
        backend,
        eos_ids=[number for number in named + (ends if isinstance(ends, list) else [ends]) if isinstance(number, int)],
        chat_template=_template_of(folder, settings),
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=eos_token,
    )


def _from_gguf(path: Path) -> TextTokenizer:
    metadata = read_metadata(path)
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _GGUF_PRE_TOKENIZERS:
        known = ", ".join(sorted(_GGUF_PRE_TOKENIZERS))
        raise ConfigError(
            f"the tokenizer in {path} is {model!r} with pre-tokenizer {pre!r}; only {known} is known from GGUF",
            hint="give the model's tokenizer.json instead",
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = _GGUF_PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == _GGUF_CONTROL, normalized=False)])
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    return TextTokenizer(
        backend,
        eos_ids=[eos] if eos is not None else [],
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=tokens[bos] if bos is not None else "",
        eos_token=tokens[eos] if eos is not None else "",
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


# A GGUF file only names its pre-tokenizer. Each name here was compared with llama.cpp, string by string.
_GGUF_PRE_TOKENIZERS = {"smollm": _smollm}


def _json_beside(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="copy it from the model again") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _template_of(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {str(item.get("name")): str(item.get("template")).removesuffix("\n") for item in template}
        if "tool_use" in named and "default" in named:
            return "{% if tools %}" + named["tool_use"] + "{% else %}" + named["default"] + "{% endif %}"
        return named.get("default")
    return str(template) if template else None
