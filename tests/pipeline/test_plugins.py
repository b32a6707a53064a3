"""Plug-ins by short name, dotted path and entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import TaskError

CATALOGUE = Catalogue("shape", "rollyard.test_shapes", {"ordered": "collections:OrderedDict"}, TaskError)


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds a plug-in."""
    (tmp_path / "shapes_of_a_test.py").write_text("class Round: ...\n")
    info = tmp_path / "shapes_of_a_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes-of-a-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rollyard.test_shapes]\nround = shapes_of_a_test:Round\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_name_leads_to_what_ships_a_path_or_an_entry_point(other_package: None) -> None:
    assert CATALOGUE.load("ordered").__name__ == "OrderedDict"
    assert CATALOGUE.load("collections:deque").__name__ == "deque"
    assert CATALOGUE.load("round").__name__ == "Round"
    with pytest.raises(TaskError, match=r"no shape is called 'rond' .did you mean 'round'. known are ordered, round"):
        CATALOGUE.load("rond")


@pytest.mark.parametrize("path", ["collections:Nothing", "no_such_module:X", ":X", "collections:"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(TaskError, match="cannot be loaded from"):
        CATALOGUE.load(path)
