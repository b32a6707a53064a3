"""A rollout as one page of HTML that needs nothing else: its tree, and the tokens, turns and messages of its samples.

Whatever a model, an agent or a user wrote is escaped, and the page forbids itself scripts and the network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape

from rollyard.pipeline.viewer.facts import (
    Facts,
    branch_words,
    break_words,
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
    quoted,
    segments,
    shade,
    shared_messages,
    shared_start,
    text_of,
)
from rollyard.pipeline.viewer.tree import Row, Tree, TreeCall, calls_of
from rollyard.schemas.sample import STRUCTURAL, DriftPoint, Link, Sample

_TEMPLATE: Final = Path(__file__).with_name("page.html")
_FOLDED_CHARS: Final = 2_000
"""Context that is longer is folded away."""
_HEAD_CHARS: Final = 80

_RUN: Final = Markup('<span class="{}">{}</span>')
_FOLDED: Final = Markup(
    '<details><summary>{:,} tokens<span>{}</span></summary><div class="text"><span class="{}">{}</span></div></details>'
)
_MARK: Final = Markup('<div class="mark {}">{}<dl><dt>expected</dt><dd>{}</dd><dt>found</dt><dd>{}</dd>{}</dl></div>')
_DETAIL: Final = Markup("<dt>messages</dt><dd>{}</dd>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the tree. `target`: id of the element that it leads to."""

    graph: str
    kind: str = ""
    words: str = ""
    target: str = ""
    call: TreeCall | None = None
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    title: str
    words: list[str]
    body: Markup
    anchor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    sample: Sample
    anchor: str
    facts: Facts
    shared: Shared | None
    turns: list[_Turn]
    same_messages: tuple[int, int]
    messages: list[tuple[str, str]]
    same_tools: int | None
    tools: str


def page(view: RolloutView, token_bytes: TokenBytes | None = None) -> str:
    """The whole page. What branches share comes once. Without `token_bytes` ids stand in place of text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_safe, trim_blocks=True, lstrip_blocks=True
    )
    tree = Tree(view.samples)
    writer = _Writer(tree, token_bytes)
    branches = [writer.branch(sample, view.asked[:index]) for index, sample in enumerate(view.asked)]
    lines = [line for row in tree.rows() for line in writer.lines(row)]
    # What text may hold that UTF-8 cannot write has become an escape by now.
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"Rollout {view.rollout_id}",
        view=view,
        facts_of_rollout=rollout_facts(view),
        rows=lines,
        branches=branches,
        steps=[*(f"{least:g}" for least in SHADES), "less"],
    )


def _safe(value: Any) -> Any:
    return printable(value) if type(value) is str else value


class _Writer:
    """Writes branches, and remembers where each call stands."""

    def __init__(self, tree: Tree, token_bytes: TokenBytes | None) -> None:
        self.tree = tree
        self.token_bytes = token_bytes
        self.anchors: dict[str, str] = {}

    def branch(self, sample: Sample, earlier: Sequence[Sample]) -> _Branch:
        """One sample, without what stands in an earlier one."""
        shared = shared_start(sample, earlier)
        same = shared_messages(sample, earlier)
        twin = next((other.branch for other in earlier if other.tools == sample.tools), None)
        anchor = self.anchors[sample.sample_id] = f"b{sample.branch}"
        return _Branch(
            sample=sample,
            anchor=anchor,
            facts=sample_facts(sample),
            shared=shared,
            turns=list(self._turns(sample, shared.tokens if shared else 0)),
            same_messages=same,
            messages=[message_text(message) for message in sample.messages[same[1] :]],
            same_tools=twin,
            tools=json.dumps(sample.tools, indent=2, ensure_ascii=False, default=str),
        )

    # --- tree ---

    def lines(self, row: Row) -> Iterator[_Line]:
        """A row of the tree, which may need several lines."""
        shows = row.shows
        if isinstance(shows, TreeCall):
            yield _Line(
                graph=row.graph, call=shows, numbers=_numbers(shows), target=self.anchors.get(shows.call_id, "")
            )
        elif isinstance(shows, Sample):
            target = self.anchors.get(shows.sample_id, "")
            yield _Line(graph=row.graph, kind="end", words=branch_words(shows), target=target)
        elif isinstance(shows, Link):
            yield _Line(graph=row.graph, kind="link", words=link_words(shows, self.tree.name))
        elif isinstance(shows, DriftPoint):
            yield _Line(graph=row.graph, kind=_class_of(shows), words=break_words(shows, self.tree.name))
            for name, words in zip(("expected", "found   "), sides(shows, self.token_bytes), strict=True):
                yield _Line(graph=row.graph[:-1] + "│", kind="sides", words=f"{name}  {words}")
        else:
            yield _Line(graph=row.graph)

    # --- tokens ---

    def _turns(self, sample: Sample, start: int) -> Iterator[_Turn]:
        """The turns from token `start` on: each has the prompt before it and what was sampled."""
        calls = {call.call_id: call for call in calls_of(sample)}
        waiting = sorted(sample.drift, key=lambda point: point.position)
        begin = 0
        for index, turn in enumerate(sample.turns):
            if turn.end > start:
                yield _Turn(
                    title=f"Turn {index + 1}, {self.tree.name(turn.call_id)}",
                    words=_turn_words(sample, index, calls.get(turn.call_id)),
                    body=self._body(sample, max(begin, start), turn.end, waiting),
                    anchor=self._anchor(turn.call_id),
                )
            begin = turn.end
        size = len(sample.token_ids)
        if size > max(begin, start):
            title = "After the last turn" if sample.turns else "Tokens"
            yield _Turn(title=title, words=[], body=self._body(sample, max(begin, start), size, waiting))

    def _anchor(self, call_id: str) -> str:
        """The id of the first turn that shows a call; empty for the others."""
        call = self.tree.calls.get(call_id)
        if call is None or call_id in self.anchors:
            return ""
        self.anchors[call_id] = f"c{call.number}"
        return self.anchors[call_id]

    def _body(self, sample: Sample, start: int, end: int, waiting: list[DriftPoint]) -> Markup:
        """The tokens [start, end), with the breaks among them, which are no longer `waiting` then."""
        parts: list[Markup] = []
        for segment in segments(sample, start, end):
            while waiting and waiting[0].position <= segment.start:
                parts.append(self._mark(waiting.pop(0)))
            parts.append(self._segment(sample, segment))
        return Markup("").join(parts)

    def _mark(self, point: DriftPoint) -> Markup:
        words, detail = printable(break_words(point, self.tree.name)), printable(" ".join(point.detail.split()))
        expected, found = sides(point, self.token_bytes)
        more = _DETAIL.format(detail) if detail else Markup("")
        return _MARK.format(_class_of(point), words, expected, found, more)

    def _segment(self, sample: Sample, segment: Segment) -> Markup:
        if segment.kind == "trained":
            return Markup("".join(self._tokens(sample, segment)))
        kind = "u" if segment.kind == "sampled" else "c"
        ids = sample.token_ids[segment.start : segment.end]
        text = printable(text_of(ids, self.token_bytes)) if self.token_bytes else " ".join(map(str, ids)) + " "
        if len(text) <= _FOLDED_CHARS:
            return _RUN.format(kind, text)
        return _FOLDED.format(len(ids), quoted(text, _HEAD_CHARS), kind, text)

    def _tokens(self, sample: Sample, segment: Segment) -> Iterator[str]:
        """A span for each trained token, or for the few that share a character."""
        columns = (sample.token_ids, sample.logprobs, sample.policy_versions)
        ids, logprobs, versions = (column[segment.start : segment.end].tolist() for column in columns)
        turn = "-" if segment.turn is None else segment.turn + 1
        for first, after, text in self._pieces(sample, segment):
            start, end = first - segment.start, after - segment.start
            found = shade(sum(logprobs[start:end]))
            looks = f"s{'u' if found is None else found}" + (" n" if text.startswith("\n") else "")
            numbers = ",".join(map(str, ids[start:end]))
            known = ",".join("?" if math.isnan(each) else f"{each:.3f}" for each in logprobs[start:end])
            version = versions[start] if versions[start] >= 0 else "?"
            # Numbers and names of ours need no escape, and there are tens of thousands of them.
            facts = f'class="{looks}" data-i="{numbers}" data-l="{known}" data-v="{version}" data-n="{turn}"'
            yield f"<span {facts}>{escape(printable(text))}</span>"

    def _pieces(self, sample: Sample, segment: Segment) -> Iterator[tuple[int, int, str]]:
        if self.token_bytes is not None:
            return pieces(sample, segment, self.token_bytes)
        ids = sample.token_ids[segment.start : segment.end]
        return ((at, at + 1, f"{each} ") for at, each in enumerate(ids, segment.start))


def _class_of(point: DriftPoint) -> str:
    return "link" if point.reason in STRUCTURAL else "break"


def _numbers(call: TreeCall) -> tuple[str, ...]:
    """New and sampled tokens, mean logprob and reward, as far as they are known."""
    return (
        "" if call.new_tokens is None else f"{call.new_tokens:,}",
        "" if call.sampled_tokens is None else f"{call.sampled_tokens:,}",
        "" if call.mean_logprob is None else f"{call.mean_logprob:.3f}",
        "" if call.reward is None else number(call.reward),
    )


def _turn_words(sample: Sample, index: int, call: TreeCall | None) -> list[str]:
    turn = sample.turns[index]
    words = [turn.scenario, f"tokens {turn.start:,} to {turn.end:,} sampled"]
    if not turn.trained:
        words.append("not trained here")
    if call is not None and call.mean_logprob is not None:
        words.append(f"mean logprob {call.mean_logprob:.3f}")
    if turn.reward is not None:
        words.append(f"reward {number(turn.reward)}")
    if turn.params:
        words.append(", ".join(f"{name} {value}" for name, value in sorted(turn.params.items())))
    return [*words, turn.call_id]
