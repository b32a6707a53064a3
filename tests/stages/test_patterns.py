"""Which files a pattern names: a pure rule, held against a plain one."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import TaskError
from rollyard.stages.patterns import check_pattern, is_path, matches, search

NAMES = st.text("ab.[", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4)
PARTS = st.lists(st.one_of(NAMES, st.sampled_from(["*", "**", "?", "a*", "*.b"])), min_size=1, max_size=4)


def plainly(parts: list[str], path: list[str]) -> bool:
    """The rule itself, part by part."""
    if not parts:
        return not path
    if parts[0] == "**":
        if len(parts) == 1:
            return bool(path)
        return any(plainly(parts[1:], path[number:]) for number in range(len(path) + 1))
    return bool(path) and _one(parts[0], path[0]) and plainly(parts[1:], path[1:])


def _one(part: str, name: str) -> bool:
    if not part:
        return not name
    if part[0] == "*":
        return any(_one(part[1:], name[number:]) for number in range(len(name) + 1))
    return bool(name) and part[0] in ("?", name[0]) and _one(part[1:], name[1:])


@given(PARTS, PATHS)
def test_it_is_the_plain_rule(parts: list[str], path: list[str]) -> None:
    assert matches("/".join(parts), "/".join(path)) == plainly(parts, path)


@given(PARTS, PATHS)
def test_whoever_searches_finds_what_matches(parts: list[str], path: list[str]) -> None:
    pattern, found = "/".join(parts), "/".join(path)
    if matches(pattern, found):
        folder, name = search(pattern)
        assert folder == "." or PurePosixPath(found).is_relative_to(folder)
        bare = name.replace("\\", "")
        assert _one(bare, path[-1])


@pytest.mark.parametrize(
    ("pattern", "path", "named"),
    [
        ("out/", "out/a/b", True),
        ("out/", "out", False),
        ("**/*.json", "a.json", True),
        ("**/*.json", "x/y/a.json", True),
        ("*.json", "x/a.json", False),
        ("a+(b).txt", "a+(b).txt", True),
        ("./a", "a", True),
        (".hidden/*", ".hidden/.x", True),
    ],
)
def test_examples(pattern: str, path: str, named: bool) -> None:
    assert matches(pattern, path) == named


@pytest.mark.parametrize("pattern", ["", "/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_what_leads_out_is_no_pattern(pattern: str) -> None:
    assert "is no pattern" in check_pattern(pattern)
    with pytest.raises(TaskError):
        search(pattern)


def test_a_path_is_a_pattern_without_wildcards() -> None:
    assert is_path("a/b.txt")
    assert not is_path("a/*.txt")
    assert not is_path("a/")
