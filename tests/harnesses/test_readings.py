"""What harnesses make of the outputs of agents: made-up ones, whole, cut, or of anything at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.harnesses.bundled import merged
from rollyard.harnesses.claude_code import read_claude
from rollyard.harnesses.codex import read_codex, to_toml
from rollyard.harnesses.hermes import read_hermes
from rollyard.harnesses.mini_swe_agent import read_mini
from rollyard.harnesses.openclaw import read_openclaw
from rollyard.harnesses.opencode import read_opencode
from rollyard.harnesses.reading import Reading, agent_result, complaint_class
from rollyard.schemas.errors import HarnessError


def lines(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "item.completed", "item": {"type": kind, **more}}


def kind_of(reading: Reading, exit_code: int | None = 0) -> str | None:
    failure = agent_result("it", exit_code, reading, b"last words\n").failure
    return failure.kind if failure else None


CODEX_DONE = {"type": "turn.completed", "usage": {"input_tokens": 90, "output_tokens": 30}}
REMARK = item("error", message="Model metadata not found")
RETRY = {"type": "error", "message": "Reconnecting... 1/5 (HTTP 500)"}


@pytest.mark.parametrize(
    ("output", "exit_code", "kind", "answer"),
    [
        (lines(REMARK, RETRY, item("agent_message", text="Hi"), CODEX_DONE), 0, None, "Hi"),
        (lines(item("agent_message", text="Hi"), CODEX_DONE), 1, "agent", "Hi"),
        (lines(item("command_execution"), CODEX_DONE), 0, None, ""),
        (lines(REMARK, CODEX_DONE), 0, "agent", ""),  # tokens were sampled, and nothing of them reached it
        (lines({"type": "turn.completed", "usage": {"output_tokens": 1}}), 0, None, ""),  # the model said nothing
        (
            lines({"type": "turn.failed", "error": {"message": "unexpected status 503 Service Unavailable"}}),
            1,
            "llm",
            "",
        ),
        (lines({"type": "turn.failed", "error": {"message": "session_limit_exceeded"}}), 1, "agent_budget", ""),
        (lines({"type": "turn.failed", "error": {"message": "status 401 Unauthorized: network"}}), 1, "agent", ""),
        (lines({"type": "turn.failed"}), 0, "agent", ""),
        (lines(item("agent_message", text="So far")), -9, "agent", "So far"),
        (b'"type":"item.completed"}\n' + lines(item("agent_message", text="x"), CODEX_DONE)[:-5], 0, "agent", "x"),
        (b"", 0, "agent", ""),
    ],
)
def test_codex(output: bytes, exit_code: int, kind: str | None, answer: str) -> None:
    reading = read_codex(output)
    assert (kind_of(reading, exit_code), reading.answer) == (kind, answer)


def said(text: str, number: str = "m1") -> dict[str, Any]:
    return {"type": "assistant", "message": {"id": number, "content": [{"type": "text", "text": text}]}}


CLAUDE_DONE = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 4, "result": "Done"}


@pytest.mark.parametrize(
    ("output", "exit_code", "kind", "answer"),
    [
        (lines(said("Hm"), CLAUDE_DONE), 0, None, "Done"),
        (
            lines(CLAUDE_DONE | {"is_error": True, "api_error_status": 529, "result": "API Error"}),
            1,
            "llm",
            "API Error",
        ),
        (lines(CLAUDE_DONE | {"is_error": True, "result": "it has reached its limit"}), 1, "agent_budget", None),
        (lines({"type": "result", "subtype": "error_max_turns", "errors": ["too many"]}), 1, "agent_budget", ""),
        (lines({"type": "result"}), 0, "agent", ""),
        (lines(said("So far")), -9, "agent", "So far"),
        (lines({"type": "system", "subtype": "api_retry", "error_status": 529}), -9, "llm", ""),
        (lines({"type": "system", "subtype": "api_retry", "error_status": 529}, said("Hm")), -9, "agent", "Hm"),
        (b"garbage", 0, "agent", ""),
    ],
)
def test_claude_code(output: bytes, exit_code: int, kind: str | None, answer: str | None) -> None:
    reading = read_claude(output)
    assert kind_of(reading, exit_code) == kind
    assert answer is None or reading.answer == answer


def step(reason: str) -> dict[str, Any]:
    return {"type": "step_finish", "part": {"reason": reason, "tokens": {"input": 5, "output": 2}}}


@pytest.mark.parametrize(
    ("output", "max_steps", "kind"),
    [
        (lines(step("tool-calls"), step("stop")), 0, None),
        (lines(step("tool-calls"), step("stop")), 3, None),
        (lines(step("tool-calls"), step("stop")), 2, "agent_budget"),
        (lines(step("tool-calls")), 0, "agent"),
        (
            lines({"type": "error", "error": {"name": "APIError", "data": {"message": "no", "statusCode": 503}}}),
            0,
            "llm",
        ),
        (lines(step("stop"), {"type": "error"}), 0, "agent"),
        (b"", 0, "agent"),
    ],
)
def test_opencode(output: bytes, max_steps: int, kind: str | None) -> None:
    assert kind_of(read_opencode(output, max_steps)) == kind


@pytest.mark.parametrize(
    ("usage", "max_turns", "kind"),
    [
        ({"completed": True, "failed": False, "api_calls": 3}, 3, None),
        ({"completed": True, "failed": False, "api_calls": 3}, 2, "agent_budget"),
        ({"completed": False, "failed": True, "failure": "HTTP 500"}, 0, "llm"),
        ({"completed": False, "failed": True}, 0, "agent"),
        ({"completed": False, "failed": False}, 0, "agent"),
        ({}, 0, "agent"),
        (None, 0, "agent"),
    ],
)
def test_hermes_says_0_whatever_happened(usage: dict[str, Any] | None, max_turns: int, kind: str | None) -> None:
    text = None if usage is None else json.dumps(usage).encode()
    assert kind_of(read_hermes(b"words", text, max_turns)) == kind


@pytest.mark.parametrize(
    ("output", "kind", "answer"),
    [
        (
            b"noise\n" + json.dumps({"payloads": [{"text": "Done"}], "meta": {}}, indent=1).encode() + b"\n",
            None,
            "Done",
        ),
        (lines({"payloads": [], "meta": {"aborted": True}}), "agent", ""),
        (lines({"ok": False, "error": {"message": "HTTP 500"}}), "llm", ""),
        (lines({"ok": False}), "agent", ""),
        (lines({"payloads": [{"text": "Done"}]})[:-6], "agent", ""),
        (b"", "agent", ""),
    ],
)
def test_openclaw(output: bytes, kind: str | None, answer: str) -> None:
    reading = read_openclaw(output)
    assert (kind_of(reading), reading.answer) == (kind, answer)


KEYS = st.sampled_from(
    ["type", "subtype", "item", "text", "error", "message", "content", "usage", "output_tokens", "part", "tokens",
     "data", "ok", "payloads", "meta", "agentMeta", "info", "messages", "exit_status", "submission", "model_stats",
     "api_calls", "completed", "failed", "result", "is_error", "errors", "num_turns", "reason", "id", "cache", "input"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
KINDS = st.sampled_from(
    ["item.completed", "turn.completed", "turn.failed", "error", "assistant", "result", "system", "step_finish", "text"]
)
EVENTS = st.builds(lambda kind, rest: {**rest, "type": kind}, KINDS, st.dictionaries(KEYS, JSON, max_size=5))
OUTPUTS = st.binary(max_size=60) | st.lists(EVENTS | st.dictionaries(KEYS, JSON, max_size=6), max_size=5).map(
    lambda events: lines(*events)
)


@given(output=OUTPUTS, cut=st.integers(0, 40), exit_code=st.sampled_from([None, -9, 0, 1]))
def test_no_output_is_too_odd(output: bytes, cut: int, exit_code: int | None) -> None:
    for given_output in (output, output[cut:], output[: len(output) - cut]):
        readings = [read(given_output) for read in (read_codex, read_claude, read_openclaw, read_opencode)]
        for reading in [*readings, read_hermes(b"x", given_output)]:
            result = agent_result("it", exit_code, reading, given_output)
            assert all(0 <= value <= 1e18 for value in result.metrics.values())
            assert result.failure is not None or exit_code == 0
        try:
            read_mini(exit_code, given_output, b"")
        except HarnessError:
            assert exit_code == 0


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        ("Error: connect ECONNREFUSED 127.0.0.1:8400", "llm"),
        ("HTTP 429: slow down", "llm"),
        ("prompt is too long: 9 tokens > 8 maximum", "agent_budget"),
        ("HTTP 401: unauthorized", "agent"),
        ("cannot read properties of undefined", "agent"),
    ],
)
def test_what_a_complaint_is_about(complaint: str, kind: str) -> None:
    assert complaint_class(complaint) == kind


def test_configurations_are_merged_and_written() -> None:
    whole = merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4, "e.f": "x"}, "d": [1]})
    assert whole == {"a": {"b": 1, "c": 4, "e.f": "x"}, "d": [1]}
    assert to_toml(whole) == 'a.b = 1\na.c = 4\na."e.f" = "x"\nd = [1]\n'
