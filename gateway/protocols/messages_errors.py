"""Refusals in the shape and the words of Anthropic's API, by which agents tell what to do next."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rollyard.gateway.refusal import Refusal

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# This API says 529 for what HTTP has 503 for. Agents take 410, of a closed session, for final, so it stays.
_STATUSES: Final = {503: 529}


def refused(refusal: Refusal) -> tuple[int, bytes]:
    """HTTP status and body."""
    return _status(refusal), msgspec.json.encode(error_of(refusal))


def error_of(refusal: Refusal) -> dict[str, Any]:
    """The body as an object: {"type": "error", "error": {type, message}}."""
    status = _status(refusal)
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message(refusal)}}


def _status(refusal: Refusal) -> int:
    return _STATUSES.get(refusal.status, refusal.status)


def _message(refusal: Refusal) -> str:
    if refusal.code != "context_length_exceeded":
        return str(refusal)
    # Claude Code looks for these words, reads the numbers, and compacts its history by them.
    facts = refusal.facts
    if "prompt_tokens" in facts and "limit" in facts:
        return f"prompt is too long: {facts['prompt_tokens']} tokens > {facts['limit']} maximum"
    return f"prompt is too long: {refusal}"
