"""Patches as git prints them: which files they touch, and the patch without some of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

_HEADER: Final = re.compile(rb"^diff --git (.+)$", re.MULTILINE)
_PATHS: Final = re.compile(rb"^(?:--- |\+\+\+ |rename (?:from|to) |copy (?:from|to) )(.+?)\t?$", re.MULTILINE)
_PLAIN_HEADER: Final = re.compile(rb'(?:"?a/(?P<old>.+?)"?) (?:"?b/(?P<new>.+?)"?)\Z')
_NOWHERE: Final = b"/dev/null"


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a patch does to one file, or to two when it renames one."""

    paths: frozenset[str]
    text: bytes


def split(patch: bytes) -> list[FilePatch]:
    """The parts of a patch, one a file. What stands before the first header is left out."""
    starts = [match.start() for match in _HEADER.finditer(patch)]
    return [_part(patch[start:end]) for start, end in pairwise([*starts, len(patch)])]


def files_of(patch: str) -> set[str]:
    """The files that a patch touches, as paths in the repository; of one without git's headers too."""
    data = patch.encode()
    parts = split(data)
    if parts:
        return set().union(*(part.paths for part in parts))
    return {path for line in _PATHS.findall(data) if (path := _path(line))}


def without(patch: bytes, drop: Callable[[str], bool]) -> tuple[bytes, int]:
    """The patch without the files that `drop` names, and how many parts that were."""
    parts = split(patch)
    kept = [part.text for part in parts if not any(map(drop, part.paths))]
    return b"".join(kept), len(parts) - len(kept)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path, or its last part, matches a shell pattern."""
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path, pattern) or fnmatchcase(name, pattern) for pattern in patterns)


def _part(text: bytes) -> FilePatch:
    head, _, _ = text.partition(b"\n@@")
    paths = {path for line in _PATHS.findall(head) if (path := _path(line))}
    first, _, _ = text.partition(b"\n")
    # Files that are empty, binary or change their mode only have no other line with a name.
    if match := _PLAIN_HEADER.match(first.removeprefix(b"diff --git ")):
        paths |= {_text(match["old"]), _text(match["new"])}
    return FilePatch(frozenset(paths), text)


def _path(line: bytes) -> str:
    line = line.strip().strip(b'"')
    if line == _NOWHERE:
        return ""
    for prefix in (b"a/", b"b/"):
        if line.startswith(prefix):
            line = line.removeprefix(prefix)
            break
    return _text(line)


def _text(path: bytes) -> str:
    """A path; git writes bytes beyond ASCII, and some signs, as octal escapes."""
    plain = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), path)
    return plain.replace(rb"\"", b'"').replace(rb"\\", b"\\").decode(errors="replace")
