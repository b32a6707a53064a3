"""Which files a pattern such as `out/**/*.json` names: pure rules on relative paths."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from rollyard.schemas.errors import TaskError

WILD: Final = re.compile(r"[*?]")


def check_pattern(pattern: str) -> str:
    """What is wrong with a pattern; empty: nothing."""
    parts = pattern.split("/")
    if not pattern or pattern.startswith("/") or ".." in parts or "\0" in pattern:
        return f"{pattern!r} is no pattern below the folder; write for example 'out/*.json'"
    return ""


def is_path(pattern: str) -> bool:
    """Whether it names one file."""
    return not WILD.search(pattern) and not pattern.endswith("/")


def matches(pattern: str, path: str) -> bool:
    """Whether a relative path is named: `*` and `?` stay within one folder, `**` is any number of folders.

    A name that starts with a dot is a name like any other. A pattern that ends in `/` means all that is below.
    """
    return _compiled(pattern).match(path) is not None


def search(pattern: str) -> tuple[str, str]:
    """Where to look for it, and by which names: the folder before the first wildcard, and a `find -name`."""
    parts = _parts(pattern)
    fixed: list[str] = []
    for part in parts[:-1]:
        if WILD.search(part):
            break
        fixed.append(part)
    name = re.sub(r"([\\\[\]])", r"\\\1", parts[-1])
    return "/".join(fixed) or ".", "*" if name == "**" else name


def _parts(pattern: str) -> list[str]:
    if problem := check_pattern(pattern):
        raise TaskError(problem)
    if pattern.endswith("/"):
        pattern += "**"
    return [part for part in pattern.split("/") if part not in ("", ".")] or ["**"]


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = _parts(pattern)
    text = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            text += ".+" if last else "(?:[^/]+/)*"
        else:
            text += _within_a_folder(part) + ("" if last else "/")
    return re.compile(f"(?s:{text})\\Z")


def _within_a_folder(part: str) -> str:
    return "".join({"*": "[^/]*", "?": "[^/]"}.get(sign, re.escape(sign)) for sign in part)
