"""A sample's tokens as text that is safe to show: what is trained, sampled or context, and how sure the model was."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from rollyard.schemas.call import Message
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.sample import Sample

TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for, often not whole characters."""
Kind = Literal["trained", "sampled", "context"]

SHADES: Final = (0.9, 0.5, 0.2, 0.05, 0.01)
"""Least probability of each shade, from confident to surprised; a last shade has what is less probable."""
LEAST_SHARED: Final = 32
"""Equal tokens at the start of two branches that are worth a reference: less is the head of any chat template."""

_KINDS: Final[tuple[Kind, ...]] = ("context", "sampled", "trained")
_LONGEST_PIECE: Final = 8
_LONGEST_PART: Final = 200
_REASONING: Final = ("reasoning_content", "reasoning")
_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and newline
    "\ud800-\udfff"  # halves of a pair: no encoding can write them
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # they turn the direction of text, or break lines
    "\U000e0000-\U000e007f]"  # text that nobody sees
)


def printable(text: str) -> str:
    """Text that cannot drive a terminal or a page: what is not seen, or moves what is seen, is shown as an escape."""
    return _UNSAFE.sub(lambda match: _escape(ord(match[0])), text)


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(text: str, limit: int = 60) -> str:
    """A text on one line between quotation marks, cut after `limit` characters."""
    shown = text[:limit].replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace('"', '\\"')
    return f'"{printable(shown)}"' + ("..." if len(text) > limit else "")


def text_of(ids: TokenIds, token_bytes: TokenBytes) -> str:
    """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, ids.tolist())).decode(errors="replace")


def shade(logprob: float) -> int | None:
    """The shade of a trained token, an index: 0 is the most confident. None: its logprob is not known."""
    if math.isnan(logprob):
        return None
    probability = math.exp(min(logprob, 0.0))
    return next((index for index, least in enumerate(SHADES) if probability >= least), len(SHADES))


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of one kind. `turn`: index in `Sample.turns` of the one that sampled them, or None."""

    start: int
    end: int
    kind: Kind
    turn: int | None


def segments(sample: Sample, start: int = 0, end: int | None = None) -> Iterator[Segment]:
    """The tokens [start, end) as segments, in order. One ends at each drift point too."""
    size = len(sample.token_ids)
    end = size if end is None else min(end, size)
    kinds = np.zeros(size, dtype=np.int8)
    owners = np.full(size, -1, dtype=np.int32)
    for index, turn in enumerate(sample.turns):
        kinds[turn.start : turn.end] = 1
        owners[turn.start : turn.end] = index
    kinds[np.asarray(sample.loss_mask).astype(bool)] = 2
    edges = np.flatnonzero((np.diff(kinds) != 0) | (np.diff(owners) != 0)) + 1
    cuts = {start, end, *edges.tolist(), *(point.position for point in sample.drift)}
    for left, right in pairwise(sorted(cut for cut in cuts if start <= cut <= end)):
        owner = int(owners[left])
        yield Segment(left, right, _KINDS[kinds[left]], owner if owner >= 0 else None)


def pieces(sample: Sample, segment: Segment, token_bytes: TokenBytes) -> Iterator[tuple[int, int, str]]:
    """Start, end and text of each token of a segment. Tokens that share a character stay together."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start, text = segment.start, ""
    for at, number in enumerate(sample.token_ids[segment.start : segment.end].tolist(), segment.start):
        text += decoder.decode(token_bytes(number))
        waits = decoder.getstate()[0]
        if not waits or at + 1 == segment.end or at + 1 - start >= _LONGEST_PIECE:
            text += decoder.decode(b"", final=True)
            yield start, at + 1, text
            start, text = at + 1, ""


@dataclass(frozen=True, slots=True)
class Shared:
    """The first tokens and messages of a branch, which stand in an earlier one too."""

    branch: int
    tokens: int


def shared_start(sample: Sample, earlier: Sequence[Sample]) -> Shared | None:
    """The earlier branch that has most of this one's first tokens. No token that this one trains is among them."""
    mask = np.asarray(sample.loss_mask)
    limit = int(mask.argmax()) if mask.any() else len(mask)
    best = max(earlier, key=lambda other: _common(sample.token_ids, other.token_ids), default=None)
    if best is None:
        return None
    tokens = min(limit, _common(sample.token_ids, best.token_ids))
    return Shared(best.branch, tokens) if tokens >= LEAST_SHARED else None


def _common(left: TokenIds, right: TokenIds) -> int:
    size = min(len(left), len(right))
    differs = np.asarray(left)[:size] != np.asarray(right)[:size]
    return int(differs.argmax()) if differs.any() else size


def shared_messages(sample: Sample, earlier: Sequence[Sample]) -> tuple[int, int]:
    """The earlier branch that has most of this one's first messages, and how many; (0, 0) when none has any."""
    counts = [(_equal(sample.messages, other.messages), other.branch) for other in earlier]
    count, branch = max(counts, key=lambda each: each[0], default=(0, 0))
    return (branch, count) if count else (0, 0)


def _equal(left: Sequence[Any], right: Sequence[Any]) -> int:
    same = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        same += 1
    return same


def message_text(message: Message) -> tuple[str, str]:
    """Role and text of a message, for people: reasoning, content and tool calls."""
    lines = [str(message[key]) for key in _REASONING if message.get(key)]
    content = message.get("content")
    if isinstance(content, list):
        lines += map(_part, content)
    elif content:
        lines.append(str(content))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        named = function if isinstance(function, dict) else {"arguments": call}
        lines.append(f"-> {named.get('name', '?')}({named.get('arguments', '')})")
    return printable(str(message.get("role", "?"))), printable("\n".join(lines))


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    # An image may be written out in it.
    shown = str(part)
    return shown if len(shown) <= _LONGEST_PART else f"{shown[:_LONGEST_PART]}..."
