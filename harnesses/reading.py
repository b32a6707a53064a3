"""What agents say of their own end, made into results: an exit status alone is not believed.

Everything here is pure and takes any bytes: cut at the front, cut at the end, garbage or nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from rollyard.harnesses.harness import MAX_ANSWER_BYTES, MAX_TAIL_BYTES, NO_MODEL_HINT
from rollyard.schemas.failure import Failure, FailureClass
from rollyard.schemas.rollout import AgentResult

MAX_NUMBER: Final = 1e15

LIMITS: Final = re.compile(
    r"session_limit_exceeded|reached its limit|context_length_exceeded|context (window|length)|ran out of room"
    r"|prompt is too long"
    r"|max(imum)?[ _](turns|iterations|steps)",
    re.IGNORECASE,
)
_MODEL: Final = re.compile(
    r"(?:http|status|error|code)\D{0,20}(?:408|429|5\d\d)\b|\b5\d\d \w"
    r"|overloaded|unavailable|rate.?limit|too many requests|internal server error|bad gateway"
    r"|connect|network|econn|enotfound|socket|fetch failed|timed? ?out|stream (?:closed|disconnected|ended|error)",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(
    r"invalid_api_key|session_closed|unauthorized|forbidden|\b(?:401|403|410)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an agent's output says. `complaint` is what went wrong in its own words; empty: nothing that it knows of."""

    answer: str = ""
    finished: bool = False  # it said that its work came to an end, good or bad
    complaint: str = ""
    out_of_budget: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def agent_result(name: str, exit_code: int | None, reading: Reading, tail: bytes) -> AgentResult:
    """The result of the agent `name`; `tail` is the end of what it wrote for people.

    It has done its work only if it said so, complained of nothing, and ended with status 0.
    """
    said = tail[-MAX_TAIL_BYTES:].decode(errors="replace").strip()
    return AgentResult(
        exit_code=exit_code,
        answer=reading.answer.encode(errors="replace")[:MAX_ANSWER_BYTES].decode(errors="ignore").strip(),
        output_tail=said,
        metrics={key: value for key, value in reading.metrics.items() if value},
        failure=_failure(name, exit_code, reading, said),
    )


def _failure(name: str, exit_code: int | None, reading: Reading, said: str) -> Failure | None:
    last = said.splitlines()[-1][:500] if said else "it wrote nothing to its standard error"
    if reading.out_of_budget:
        return Failure.of("agent_budget", f"{name} used up its limits: {reading.complaint or last}")
    if reading.complaint:
        kind = complaint_class(reading.complaint)
        return Failure.of(kind, f"{name} failed: {reading.complaint}", NO_MODEL_HINT if kind == "llm" else "")
    if exit_code is None:
        return Failure.of("agent", f"the exit status of {name} is not known")
    if exit_code < 0:
        return Failure.of("agent", f"{name} was killed by signal {-exit_code}: {last}")
    if not reading.finished:
        return Failure.of("agent", f"{name} ended with exit status {exit_code} and did not say how: {last}")
    if exit_code > 0:
        return Failure.of("agent", f"{name} ended with exit status {exit_code}: {last}")
    return None


def complaint_class(complaint: str) -> FailureClass:
    """What an agent's complaint is about: a limit, its model, or itself."""
    if LIMITS.search(complaint):
        return "agent_budget"
    if _REFUSED.search(complaint):
        return "agent"
    return "llm" if _MODEL.search(complaint) else "agent"


def json_lines(output: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of an output, in their order; anything else is passed over."""
    for line in output.splitlines():
        found = json_object(line)
        if found is not None:
            yield found


def json_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None."""
    if not text.lstrip().startswith(b"{"):
        return None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def part(of: Any, *keys: str) -> dict[str, Any]:
    """The object at a path of keys; an empty one where there is none."""
    for key in keys:
        of = of.get(key) if isinstance(of, dict) else None
    return of if isinstance(of, dict) else {}


def text(of: Any, key: str) -> str:
    """The text under a key; empty where there is none."""
    found = of.get(key) if isinstance(of, dict) else None
    return found if isinstance(found, str) else ""


def number(of: Any, key: str) -> float:
    """The number under a key: finite and not negative; 0 where there is none."""
    found = of.get(key) if isinstance(of, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return 0.0
    return float(found) if 0 <= found <= MAX_NUMBER and math.isfinite(found) else 0.0
