"""docs/stitching.md names every rule, reason and link that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from rollyard.schemas.sample import DriftReason, LinkKind
from rollyard.stages.stitchers.lenience import NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "stitching.md").read_text()


def first_column(heading: str) -> set[str]:
    """The names in the first column of the table under a heading or before the next one."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))


def test_every_link_is_there() -> None:
    assert first_column("Branches") == set(get_args(LinkKind))


def test_every_rule_is_there() -> None:
    assert first_column("Which conversation a call goes on from") == NAMES


def test_every_reason_is_there() -> None:
    assert first_column("Breaks") == set(get_args(DriftReason))
