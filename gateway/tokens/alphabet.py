"""How the tokens of a vocabulary stand for bytes: byte-level BPE, or SentencePiece's BPE with bytes to fall back on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer, decoders

from rollyard.schemas.errors import ConfigError

_SPACE: Final = "\u2581"
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The bytes of a token are those of its characters, each of which stands for some; a token may also name a byte.

    `strips_space`: decoding leaves out a space at the very start. `prefixes_start`: encoding puts a space at the start
    of a text, and there only.
    """

    characters: Mapping[str, int]
    names_bytes: bool = False
    strips_space: bool = False
    prefixes_start: bool = False

    def bytes_of(self, token: str) -> bytes:
        """The bytes of a token, often not whole characters."""
        if self.names_bytes:
            named = _BYTE.fullmatch(token)
            return bytes([int(named[1], 16)]) if named else token.replace(_SPACE, " ").encode()
        try:
            return bytes(map(self.characters.__getitem__, token))
        except KeyError:  # an added token is plain text
            return token.encode()

    def is_text(self, token: str) -> bool:
        """Whether a token is the text that it looks like, so that parts of it are tokens in the same sense."""
        return not (self.names_bytes and _BYTE.fullmatch(token))


def alphabet_of(backend: Tokenizer) -> Alphabet:
    """The alphabet of a tokenizer. Raises ConfigError when decoding or encoding does more than is known here."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return Alphabet(_BYTE_LEVEL)
    decoder, normalizer = _steps(backend.decoder), _steps(backend.normalizer)
    splitter = _steps(backend.pre_tokenizer)
    steps = [step["type"] for step in decoder]
    known = (
        steps in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
        and all(_strips_one_space(step) for step in decoder if step["type"] == "Strip")
        and all(_is_space(step) for step in (*decoder, *normalizer) if step["type"] in ("Replace", "Prepend"))
        and all(step["type"] in ("Replace", "Prepend") for step in normalizer)
        and all(step["type"] in ("Metaspace", "Split") for step in splitter)
        and len(splitter) <= 1
        and all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(0x100))
    )
    if not known:
        raise ConfigError(
            f"the tokenizer decodes with {', '.join(steps) or 'nothing'}: neither byte-level nor SentencePiece BPE",
            hint="use a model with one of the two, or a server that returns token ids itself",
        )
    return Alphabet(
        {},
        names_bytes=True,
        strips_space="Strip" in steps,
        prefixes_start=any(step.get("prepend_scheme") == "first" for step in splitter),
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """What a part of a tokenizer does, one step after another, as tokenizer.json has it."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return next((state[key] for key in ("decoders", "normalizers", "pretokenizers") if key in state), [state])


def _is_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Prepend":
        return bool(step["prepend"] == _SPACE)
    return {step["pattern"].get("String"), step["content"]} == {" ", _SPACE}


def _strips_one_space(step: dict[str, Any]) -> bool:
    return bool(step["content"] == " " and step["start"] == 1 and step["stop"] == 0)


def _byte_level() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes: printable ones as they are, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_LEVEL: Final = _byte_level()
