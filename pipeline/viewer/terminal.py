"""Samples in a terminal: the branches of a rollout as a tree, and their text with the trained tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from rollyard.pipeline.viewer.facts import (
    Facts,
    branch_words,
    break_words,
    count_of,
    link_words,
    number,
    rollout_facts,
    sample_facts,
    sides,
)
from rollyard.pipeline.viewer.rollout import RolloutView
from rollyard.pipeline.viewer.text import (
    SHADES,
    Segment,
    Shared,
    TokenBytes,
    message_text,
    pieces,
    printable,
    segments,
    shade,
    shared_messages,
    shared_start,
    text_of,
)
from rollyard.pipeline.viewer.tree import Row, Tree, TreeCall
from rollyard.schemas.sample import STRUCTURAL, DriftPoint, Link, Sample

OPEN, CLOSE = "⟦", "⟧"
NOTE_OPEN, NOTE_CLOSE = "⟪", "⟫"
IDS_SHOWN: Final = 16

PLAIN: Final = "\x1b[0m"
BOLD: Final = "\x1b[1m"
CONTEXT: Final = "\x1b[2m"
SAMPLED: Final = "\x1b[38;5;67m"
NOTE: Final = "\x1b[1;35m"
BREAK: Final = "\x1b[1;31m"
LINKED: Final = "\x1b[1;36m"
TRAINED: Final = "\x1b[1;32m"
"""Trained, where no logprob is known."""
RAMP: Final = tuple(f"\x1b[38;5;{colour}m" for colour in (34, 70, 142, 178, 208, 203))
"""Trained, by shade: green to red, all of a lightness that dark and light terminals show."""
_MARKS: Final = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in (OPEN, CLOSE, NOTE_OPEN, NOTE_CLOSE)})


def render(sample: Sample, token_bytes: TokenBytes | None = None, *, colour: bool = False) -> str:
    """One sample by itself. Trained tokens are coloured by their probability, or stand in ⟦ ⟧ without `colour`.

    Without `token_bytes` messages are shown as logged, and ids.
    """
    ink = _Ink(colour, token_bytes)
    return "\n\n".join([_facts(sample_facts(sample, alone=True)), *ink.text(sample, (), None), ink.legend(sample, 0)])


def render_rollout(view: RolloutView, token_bytes: TokenBytes | None = None, *, colour: bool = False) -> Iterator[str]:
    """The rollout and its tree, then the samples that are asked for, a block each. What branches share comes once."""
    ink = _Ink(colour, token_bytes)
    yield _facts(rollout_facts(view))
    if view.samples:
        yield "\n".join(ink.tree(view.samples))
    for index, sample in enumerate(view.asked):
        title = f"── branch {sample.branch + 1} of {sample.branches} ".ljust(72, "─")
        yield ink.paint(title, BOLD) + "\n" + _facts(sample_facts(sample))
        shared = shared_start(sample, view.asked[:index])
        yield from ink.text(sample, view.asked[:index], shared)
        yield ink.legend(sample, shared.tokens if shared else 0)


def _facts(rows: Facts) -> str:
    return "\n".join(f"{name:<8} {printable(value)}" for name, value in rows)


class _Ink:
    """Writes with colours, or with marks."""

    def __init__(self, colour: bool, token_bytes: TokenBytes | None) -> None:
        self.colour = colour
        self.token_bytes = token_bytes

    def paint(self, text: str, style: str) -> str:
        """Coloured line by line: pagers forget a colour at the end of a line."""
        if not self.colour or not style:
            return text
        return "\n".join(f"{style}{line}{PLAIN}" if line else "" for line in text.split("\n"))

    def note(self, words: str) -> str:
        """Words of ours amid a sample's text."""
        return self.paint(f"{NOTE_OPEN}{printable(words)}{NOTE_CLOSE}", NOTE)

    def legend(self, sample: Sample, start: int) -> str:
        """How many tokens are trained, and what the colours from `start` on mean."""
        words = f"{sample.loss_mask.data.count(1):,} of {len(sample.token_ids):,} tokens are trained"
        if not self.colour:
            return f"{words} (in {OPEN} {CLOSE})"
        steps = [*(f"{least:g}" for least in SHADES), "less"]
        ramp = " ".join(self.paint(step, style) for step, style in zip(steps, RAMP, strict=True))
        legend = f"{words}; by probability, at least {ramp}"
        if any(segment.kind == "sampled" for segment in segments(sample, start)):
            legend += f"; {self.paint('sampled, not trained', SAMPLED)}"
        return legend

    # --- text ---

    def text(self, sample: Sample, earlier: Sequence[Sample], shared: Shared | None) -> Iterator[str]:
        """The blocks of a sample's text, without what stands in an earlier one."""
        if self.token_bytes is None:
            branch, count = shared_messages(sample, earlier)
            if count:
                yield self.note(f"{count_of(count, 'message')} as in branch {branch + 1}")
            yield from ("[{}]\n{}".format(*message_text(message)) for message in sample.messages[count:])
        parts = []
        shared = shared_start(sample, earlier)
        if shared:
            parts.append(
                self.note(f"the first {shared.tokens:,} tokens are those of branch {shared.branch + 1}") + "\n"
            )
        waiting = sorted(sample.drift, key=lambda point: point.position)
        between = " " if self.token_bytes is None else ""
        for segment in segments(sample, shared.tokens if shared else 0):
            while waiting and waiting[0].position <= segment.start:
                parts.append(self.note(self._was(waiting.pop(0))) + between)
            parts.append(self._segment(sample, segment) + between)
        parts += [self.note(self._was(point)) for point in waiting]
        yield "".join(parts).rstrip(" ") if between else "".join(parts)

    def _was(self, point: DriftPoint) -> str:
        if point.reason in STRUCTURAL:
            return f"{point.reason}: other tokens than before from here on"
        return f"{point.reason}: here stood {sides(point, self.token_bytes)[0]}"

    def _segment(self, sample: Sample, segment: Segment) -> str:
        trained = segment.kind == "trained"
        ids = sample.token_ids[segment.start : segment.end]
        if self.colour and trained and self.token_bytes is not None:
            return self._shaded(sample, segment, self.token_bytes)
        text = _ids(ids.tolist()) if self.token_bytes is None else printable(text_of(ids, self.token_bytes))
        if self.colour:
            return self.paint(text, {"trained": TRAINED, "sampled": SAMPLED, "context": CONTEXT}[segment.kind])
        text = text.translate(_MARKS)
        return f"{OPEN}{text}{CLOSE}" if trained else text

    def _shaded(self, sample: Sample, segment: Segment, token_bytes: TokenBytes) -> str:
        logprobs = np.asarray(sample.logprobs)
        runs: list[tuple[str, list[str]]] = []
        for start, end, text in pieces(sample, segment, token_bytes):
            found = shade(float(logprobs[start:end].sum()))
            style = TRAINED if found is None else RAMP[found]
            if not runs or runs[-1][0] != style:
                runs.append((style, []))
            runs[-1][1].append(text)
        return "".join(self.paint(printable("".join(texts)), style) for style, texts in runs)

    # --- tree ---

    def tree(self, samples: Sequence[Sample]) -> Iterator[str]:
        """The drawing, line by line."""
        tree = Tree(samples)
        rows = list(tree.rows())
        cells = [_cells(row.graph, row.shows) for row in rows if isinstance(row.shows, TreeCall)]
        head = ("call", "for", "new + sampled", "logprob", "reward", "id")
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        if cells:
            yield self.paint("  ".join(map(str.ljust, head, widths)).rstrip(), CONTEXT)
        lines = iter(cells)
        for row in rows:
            if isinstance(row.shows, TreeCall):
                *values, call_id = map(str.ljust, next(lines), widths)
                line = "  ".join([*values, self.paint(call_id.rstrip(), CONTEXT)])
                dot = self.paint(row.graph[-1], TRAINED if row.shows.trained else CONTEXT)
                yield row.graph[:-1] + dot + line[len(row.graph) :]
            else:
                yield from self._row(row, tree)

    def _row(self, row: Row, tree: Tree) -> Iterator[str]:
        shows, lead = row.shows, row.graph[:-1]
        if isinstance(shows, Sample):
            words = self.paint(f"{row.graph[-1]} {printable(branch_words(shows))}", BOLD)
            yield f"{lead}{words}  {self.paint(shows.sample_id, CONTEXT)}"
        elif isinstance(shows, Link):
            yield lead + self.paint(f"{row.graph[-1]} {printable(link_words(shows, tree.name))}", LINKED)
        elif isinstance(shows, DriftPoint):
            style = LINKED if shows.reason in STRUCTURAL else BREAK
            yield lead + self.paint(f"{row.graph[-1]} {printable(break_words(shows, tree.name))}", style)
            expected, found = sides(shows, self.token_bytes)
            yield f"{lead}│   expected  {expected}"
            yield f"{lead}│   found     {found}"
            if shows.detail:
                yield f"{lead}│   {printable(' '.join(shows.detail.split()))}"
        else:
            yield row.graph


def _cells(graph: str, call: TreeCall) -> tuple[str, ...]:
    tokens = "" if call.new_tokens is None else f"{call.new_tokens:,} + {call.sampled_tokens:,}"
    logprob = "" if call.mean_logprob is None else f"{call.mean_logprob:.3f}"
    reward = "" if call.reward is None else number(call.reward)
    return f"{graph} {call.number}", call.scenario, tokens, logprob, reward, printable(call.call_id)


def _ids(ids: list[int]) -> str:
    if len(ids) <= IDS_SHOWN:
        return " ".join(map(str, ids))
    half = IDS_SHOWN // 2
    return " ".join([*map(str, ids[:half]), f"... {len(ids) - IDS_SHOWN} more ...", *map(str, ids[-half:])])
