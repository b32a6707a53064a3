"""One sample for people: its facts, and its text with the trained tokens marked."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from rollyard.schemas.sample import Sample

Decode = Callable[[list[int]], str]

TRAINED_COLOUR: Final = "\x1b[1;32m"
CONTEXT_COLOUR: Final = "\x1b[2m"
PLAIN: Final = "\x1b[0m"
OPEN, CLOSE = "⟦", "⟧"
IDS_SHOWN: Final = 16


def render(sample: Sample, decode: Decode | None = None, *, colour: bool = False) -> str:
    """The sample as text. Trained tokens are green, or stand in ⟦ ⟧ without `colour`.

    `decode` turns token ids into text, special tokens included; without it messages are shown as logged, and ids.
    """
    parts = [_facts(sample)]
    if decode is None:
        parts += [_message(message) for message in sample.messages]
        parts.append(" ".join(_mark(_ids(ids), trained, colour) for ids, trained in _spans(sample)))
    else:
        parts.append("".join(_mark(printable(decode(ids)), trained, colour) for ids, trained in _spans(sample)))
    legend = "green" if colour else f"in {OPEN} {CLOSE}"
    trained_count = sample.loss_mask.data.count(1)
    parts.append(f"{trained_count} of {len(sample.token_ids)} tokens are trained ({legend})")
    return "\n\n".join(parts)


def _facts(sample: Sample) -> str:
    mask = np.asarray(sample.loss_mask).astype(bool)
    versions = sorted({int(version) for version in np.asarray(sample.policy_versions)[mask]})
    logprobs = np.asarray(sample.logprobs)[mask]
    rows = [
        ("sample", sample.sample_id),
        ("rollout", f"{sample.rollout_id}, {sample.index} of group {sample.group_id}, attempt {sample.attempt}"),
        ("run", sample.run),
        ("branch", f"{sample.branch + 1} of {sample.branches}, {sample.scenario}, calls {', '.join(sample.calls)}"),
        ("status", sample.status),
        ("reward", "none" if sample.reward is None else f"{sample.reward:g}"),
        ("policy", ", ".join("unknown" if version < 0 else str(version) for version in versions)),
        (
            "logprob",
            f"mean {logprobs.mean():.3f} over trained tokens ({sample.logprob_kind})" if mask.any() else "none",
        ),
    ]
    return "\n".join(f"{name:<8} {printable(value)}" for name, value in rows)


def _spans(sample: Sample) -> Iterator[tuple[list[int], bool]]:
    """Runs of ids that are all trained, or all not."""
    mask = np.asarray(sample.loss_mask)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for start, stop in pairwise(edges):
        if stop > start:
            yield sample.token_ids[start:stop].tolist(), bool(mask[start])


def _mark(text: str, trained: bool, colour: bool) -> str:
    if colour:
        return f"{TRAINED_COLOUR if trained else CONTEXT_COLOUR}{text}{PLAIN}"
    return f"{OPEN}{text}{CLOSE}" if trained else text


def _ids(ids: list[int]) -> str:
    if len(ids) <= IDS_SHOWN:
        return " ".join(map(str, ids))
    half = IDS_SHOWN // 2
    return " ".join([*map(str, ids[:half]), f"... {len(ids) - IDS_SHOWN} more ...", *map(str, ids[-half:])])


def _message(message: dict[str, Any]) -> str:
    lines = [f"[{message.get('role', '?')}]"]
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    if content:
        lines.append(str(content))
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        lines.append(f"-> {function.get('name', '?')}({function.get('arguments', '')})")
    return printable("\n".join(lines))


def printable(text: str) -> str:
    """Text that cannot drive the terminal: control characters other than newline and tab are shown as escapes."""
    return "".join(
        each if each in "\n\t" or unicodedata.category(each) not in ("Cc", "Cs") else f"\\x{ord(each):02x}"
        for each in text
    )
