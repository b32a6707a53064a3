"""What test runners print: the outcome of each test by its id. Pure.

The text may hold what the code under test printed, fakes of such lines included: where a test has several outcomes, the
worst one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal
from xml.etree import ElementTree

Outcome = Literal["passed", "failed", "skipped"]
Outcomes = dict[str, Outcome]
Format = Literal["pytest", "unittest", "junit"]

_WORST_FIRST: Final[tuple[Outcome, ...]] = ("failed", "skipped", "passed")
_PYTEST: Final[Mapping[str, Outcome]] = {
    "PASSED": "passed",
    "XFAIL": "passed",
    "XPASS": "passed",
    "FAILED": "failed",
    "ERROR": "failed",
    "SKIPPED": "skipped",
}
_STATUS: Final = "|".join(_PYTEST)
_SUMMARY: Final = re.compile(r"=+ short test summary info =+\s*\Z")
_SUMMARY_LINE: Final = re.compile(rf"(?P<status>{_STATUS}) (?P<id>\S.*?)(?: - .*)?\Z")
_VERBOSE_LINE: Final = re.compile(rf"(?P<id>\S+?::.*?) (?P<status>{_STATUS})(?: .*)?\Z")
_WORKER: Final = re.compile(r"\[gw\d+\] (?:\[ *\d+%\] )?(?P<status>" + _STATUS + r") (?P<id>\S.*?)\Z")
_UNITTEST: Final[Mapping[str, Outcome]] = {
    "ok": "passed",
    "expected failure": "passed",
    "FAIL": "failed",
    "ERROR": "failed",
    "unexpected success": "failed",
    "skipped": "skipped",
}
_UNITTEST_NAME: Final = re.compile(r"(?P<test>\w+) \((?P<place>[\w.<>]+)\)(?P<rest>.*)\Z")
_UNITTEST_END: Final = re.compile(
    r"(?:.*\.\.\. ?)?(?P<status>ok|FAIL|ERROR|expected failure|unexpected success|skipped)(?: ['\"].*)?\Z"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def outcomes(text: str, form: Format) -> Outcomes:
    """The outcome of each test in a report, by every id that it may be called by. Raises ValueError for broken XML."""
    if form == "junit":
        return _worst(_junit(text))
    lines = _COLOUR.sub("", text).splitlines()
    return _worst(_pytest(lines) if form == "pytest" else _unittest(lines))


def has_begun(text: str, form: Format) -> bool:
    """Whether the runner itself came to work: what it says before the first test, or after the last."""
    if form == "pytest":
        return "test session starts" in text or _SUMMARY.search(text) is not None or " no tests ran in " in text
    if form == "unittest":
        return re.search(r"^Ran \d+ tests? in ", text, re.MULTILINE) is not None
    return bool(text.strip())


def _worst(found: Iterable[tuple[str, Outcome]]) -> Outcomes:
    worst: Outcomes = {}
    for identity, outcome in found:
        standing = worst.get(identity, "passed")
        worst[identity] = min(standing, outcome, key=_WORST_FIRST.index)
    return worst


def _pytest(lines: list[str]) -> Iterable[tuple[str, Outcome]]:
    """Of `-rA` the lines from the first summary on, and the lines of `-v`."""
    summary = False
    for line in map(str.rstrip, lines):
        summary = summary or _SUMMARY.match(line) is not None
        match = _VERBOSE_LINE.match(line) or _WORKER.match(line) or (_SUMMARY_LINE.match(line) if summary else None)
        if match is None:
            continue
        yield match["id"].strip(), _PYTEST[match["status"]]
        if match["status"] == "PASSED" and " - " in line:
            # Nothing follows the id of a test that passed, so that a dash is part of it.
            yield line.removeprefix("PASSED ").strip(), "passed"


def _unittest(lines: list[str]) -> Iterable[tuple[str, Outcome]]:
    """Of `-v`: `name (place) ... ok`, where the end may stand behind a description or output on later lines."""
    names: tuple[str, ...] = ()
    for line in map(str.rstrip, lines):
        rest = line
        if match := _UNITTEST_NAME.match(line):
            names = _unittest_ids(match["test"], match["place"])
            rest = match["rest"]
        if names and (end := _UNITTEST_END.match(rest)) is not None:
            outcome = _UNITTEST[end["status"]]
            yield from ((name, outcome) for name in names)
            names = ()


def _unittest_ids(test: str, place: str) -> tuple[str, ...]:
    """`test (a.B)`, as it is called before Python 3.11, and `a.B.test`."""
    owner = place.removesuffix(f".{test}")
    return f"{test} ({owner})", f"{test} ({owner}.{test})", f"{owner}.{test}"


def _junit(text: str) -> Iterable[tuple[str, Outcome]]:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"is no XML: {error}") from None
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        outcome: Outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name, owner, file = (case.get(key, "") for key in ("name", "classname", "file"))
        for identity in _junit_ids(name, owner, file):
            yield identity, outcome


def _junit_ids(name: str, owner: str, file: str) -> set[str]:
    """`a.b.C.name`, `a.b.C::name`, and as pytest calls it `a/b.py::C::name`, whatever part of a.b.C is the module."""
    ids = {f"{owner}.{name}", f"{owner}::{name}"} if owner else {name}
    parts = owner.split(".") if owner else []
    for count in range(1, len(parts) + 1):
        module = file or "/".join(parts[:count]) + ".py"
        ids.add("::".join([module, *parts[count:], name]))
    if file:
        ids.add(f"{file}::{name}")
    return ids
