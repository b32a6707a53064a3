"""Replies whose sampling a grammar constrains: the ids are exact, but logprobs may not know of the grammar. Pure."""

from __future__ import annotations

from typing import Any, Final

_FREE_TOOL_CHOICES: Final = (None, "auto", "none")


def constraint(extras: dict[str, Any], *, tool_choice: bool = False) -> str | None:
    """What in a request makes the server constrain its sampling, or None. `tool_choice`: whether it is passed on."""
    kind = _format_kind(extras)
    if kind is not None:
        return f"response_format {kind} constrains the sampling, which its logprobs may not show"
    if tool_choice and extras.get("tool_choice") not in _FREE_TOOL_CHOICES:
        return "tool_choice constrains the sampling, which its logprobs may not show"
    return None


def json_schema(extras: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that response_format asks for; None where it asks for none."""
    kind = _format_kind(extras)
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        return None
    named = extras["response_format"].get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    return schema if isinstance(schema, dict) else {"type": "object"}


def _format_kind(extras: dict[str, Any]) -> str | None:
    asked = extras.get("response_format")
    kind = asked.get("type") if isinstance(asked, dict) else None
    return kind if isinstance(kind, str) and kind != "text" else None
