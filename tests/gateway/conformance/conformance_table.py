"""Protocol by feature: what the cases show, as the table of docs/gateway.md.

python tests/gateway/conformance/conformance_table.py   write it there
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gateway_rig import Talk

DOCUMENT: Final = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"
BEGIN: Final = "<!-- written by tests/gateway/conformance/conformance_table.py -->"
END: Final = "<!-- end -->"
PROTOCOLS: Final = {"chat": "Chat", "responses": "Responses", "messages": "Messages", "completions": "Completions"}
CASES: Final = ("cases_conversation", "cases_tools", "cases_streams", "cases_errors")
VLLM: Final = ("vllm-capture", "vllm-tokens")
EVERY: Final = (*VLLM, "sglang-capture", "sglang-tokens")
YES: Final = "yes"
NA: Final = "n.a."

Case = Callable[[Talk], Awaitable[None]]


class Unsupported(Exception):
    """A case has shown what happens where the feature is not supported."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row. `cells` are what it says for each protocol; `in_tokens_mode` where that is another thing there."""

    name: str
    group: str
    case: Case
    turns: list[dict[str, Any]]
    cells: dict[str, str]
    in_tokens_mode: dict[str, str]
    models: tuple[str, ...]

    @property
    def opening(self) -> str:
        """The first words of a conversation, by which the script knows it."""
        return f"[{self.case.__name__}]"

    def cell(self, protocol: str, model: str) -> str:
        """What holds for a protocol and a model."""
        if model.endswith("-tokens"):
            return self.in_tokens_mode.get(protocol, self.cells[protocol])
        return self.cells[protocol]

    def runs(self) -> Iterator[tuple[str, str]]:
        """Every protocol and model that the case is for."""
        for protocol in PROTOCOLS:
            for model in self.models:
                if self.cell(protocol, model) != NA:
                    yield protocol, model

    def row(self) -> str:
        """The line of the table."""
        cells = []
        for protocol in PROTOCOLS:
            cell = self.cells[protocol]
            other = self.in_tokens_mode.get(protocol, cell)
            cells.append(cell if other == cell else f"{cell}; in tokens mode {other}")
        return f"| {' | '.join([self.name, *cells])} |"


FEATURES: list[Feature] = []


def feature(
    name: str,
    *turns: dict[str, Any],
    group: str,
    chat: str = YES,
    responses: str = YES,
    messages: str = YES,
    completions: str = NA,
    tokens: dict[str, str] | str = "",
    models: tuple[str, ...] = VLLM,
) -> Callable[[Case], Case]:
    """A case, and the row that it gives.

    A cell says yes, no and why, or n.a. where the protocol has no such thing. The case raises Unsupported where its
    cell says no. `turns` are what the model says in it; `tokens` is what holds in tokens mode.
    """
    cells = {"chat": chat, "responses": responses, "messages": messages, "completions": completions}
    if isinstance(tokens, str):
        tokens = {protocol: tokens for protocol, cell in cells.items() if tokens and cell != NA}

    def register(case: Case) -> Case:
        said = list(turns) or [{"content": "hello {turn}"}]
        FEATURES.append(
            Feature(name=name, group=group, case=case, turns=said, cells=cells, in_tokens_mode=tokens, models=models)
        )
        return case

    return register


def features() -> list[Feature]:
    """Every feature that there are cases for."""
    for module in CASES:
        import_module(module)
    return FEATURES


def table() -> str:
    """The table, one part for each group."""
    lines: list[str] = []
    for group in dict.fromkeys(each.group for each in features()):
        head = f"| {' | '.join([group, *PROTOCOLS.values()])} |"
        rows = [each.row() for each in FEATURES if each.group == group]
        lines += [head, "|" + " --- |" * (len(PROTOCOLS) + 1), *rows, ""]
    return "\n".join(lines)


def written() -> str:
    """The table as it stands in the document."""
    text = DOCUMENT.read_text()
    return text.partition(BEGIN + "\n\n")[2].partition(END)[0]


def main() -> int:
    """Write it."""
    text = DOCUMENT.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        print(f"{DOCUMENT} lacks the lines between which the table goes", file=sys.stderr)
        return 1
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{table()}{END}{tail}")
    return 0


if __name__ == "__main__":
    # As `conformance_table`, so that the cases register in the module that they import.
    sys.exit(import_module("conformance_table").main())
