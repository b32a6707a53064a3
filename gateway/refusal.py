"""What an agent is told when it gets no reply, in OpenAI's own shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.schemas.errors import ModelError, PromptTooLong, RollyardError
from rollyard.schemas.packed import TokenIds

_URL = re.compile(r"https?://[^\s:]+(:\d+)?[^\s:]*")
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    410: "session_closed_error",
    413: "request_too_large_error",
    429: "rate_limit_error",
}


class Refusal(RollyardError):
    """A request ends with this HTTP status and error code. `retry_after_s` asks the agent to come again.

    `facts` are numbers for protocols that word the error themselves: `limit` and `prompt_tokens` of a too long prompt.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: int | None = None,
        facts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.facts = dict(facts or {})

    def error(self) -> dict[str, Any]:
        """The body as an object: {"error": {message, type, param, code}}."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.error())

    def headers(self) -> dict[str, str]:
        """Response headers that belong to it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def unavailable(message: str, *, code: str = "unavailable", hint: str = "", retry_after_s: int = 1) -> Refusal:
    """503 with Retry-After: the same request may be fine in a moment."""
    return Refusal(503, code, message, hint=hint, retry_after_s=retry_after_s)


def internal_error() -> Refusal:
    """500: something is broken here; the log says what."""
    return Refusal(500, "internal_error", "the gateway failed", hint="see the gateway's log")


def session_closed() -> Refusal:
    """410: the attempt that this key belongs to has ended, or another attempt has taken its place."""
    return Refusal(410, "session_closed", "this session is closed", hint="its attempt has ended; do not retry")


def long_integer() -> Refusal:
    """400: records hold integers of 64 bits."""
    return Refusal(400, "invalid_request", "an integer in the request does not fit 64 bits", hint="send a float")


def session_limit(what: str) -> Refusal:
    """400: the session has reached one of its limits."""
    return Refusal(
        400,
        "session_limit_exceeded",
        f"this session has reached its limit: {what}",
        hint="the task's agent settings set it; do not retry",
    )


def context_length_exceeded(limit: int, prompt_tokens: int) -> Refusal:
    """400 in the words that agents look for when they decide to compact."""
    return Refusal(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {prompt_tokens} "
        "tokens. Please reduce the length of the messages.",
        param="messages",
        facts={"limit": limit, "prompt_tokens": prompt_tokens},
    )


def without_addresses(text: str) -> str:
    """A text for agents: where a model server is, is nothing for them."""
    return _URL.sub("it", text)


def of_model_error(error: ModelError, server_id: str, max_context: int, prompt_ids: TokenIds | None) -> Refusal:
    """What an agent is told when a model server failed. Statuses that agents retry stay statuses that they retry.

    Where the server is, is nothing for agents: its address stays in the log.
    """
    if isinstance(error, PromptTooLong):
        if max_context and prompt_ids is not None:
            return context_length_exceeded(max_context, len(prompt_ids))
        if error.limit and error.prompt_tokens:
            return context_length_exceeded(error.limit, error.prompt_tokens)
        return Refusal(400, "context_length_exceeded", error.said, param="messages")
    answered = f" answered {error.status}" if error.status and error.said else ""
    message = f"model server {server_id}{answered}: {error.said or without_addresses(error.message)}"
    if error.status == 429:
        return Refusal(429, "server_overloaded", message, retry_after_s=1)
    if error.status == 503:
        return unavailable(message, code="server_overloaded")
    if error.status in (400, 413, 422):
        return Refusal(400, "refused_by_server", message)
    if error.status == 0 and error.retryable:
        return unavailable(message, code="server_unreachable", hint=error.hint)
    return Refusal(502, "server_failed", message, hint=error.hint)
