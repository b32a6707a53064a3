"""What OpenAI's two completion endpoints share: sampling fields, usage, events, errors.

`logprobs` and `top_logprobs` are accepted and left out of replies: logprobs are in the records, not on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollyard.gateway.exchange import Finished
from rollyard.gateway.refusal import Refusal

MAX_CHOICES: Final = 16
"""Each choice is a call of its own, with a record of its own; more of them are more requests."""

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"


class StreamOptions(Struct, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class CompletionFields(Struct, frozen=True, kw_only=True):
    """Fields that both endpoints have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def params(self) -> dict[str, Any]:
        """Sampling parameters as ModelRequest has them. Raises Refusal (400)."""
        params = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        for name in ("max_completion_tokens", "max_tokens"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if limit < 1:
                raise Refusal(400, "invalid_request", f"{name} is {limit}, it must be at least 1", param=name)
            params.setdefault("max_tokens", limit)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if stop := [text for text in stop if text]:
            params["stop"] = stop
        return params

    def choices(self) -> int:
        """How many replies are wanted. Raises Refusal (400)."""
        count = 1 if self.n is None else self.n
        if count < 1:
            raise Refusal(400, "invalid_request", f"n is {count}, it must be at least 1", param="n")
        if count > MAX_CHOICES:
            raise Refusal(
                400,
                "unsupported_value",
                f"n is {count}, the most is {MAX_CHOICES}",
                hint="send more requests, each with a smaller n",
                param="n",
            )
        return count

    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(finished: Sequence[Finished]) -> dict[str, Any]:
    """OpenAI's usage of all choices: they share one prompt."""
    first = finished[0].usage
    completion = sum(each.usage.completion_tokens for each in finished)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(each.usage.reasoning_tokens for each in finished)},
    }


def error(refusal: Refusal) -> dict[str, Any]:
    """A refusal as OpenAI words it: every 429 has the one code by which clients know a rate limit."""
    body = refusal.error()
    if refusal.status == 429:
        body["error"]["code"] = "rate_limit_exceeded"
    return body


def refuse(refusal: Refusal) -> tuple[int, bytes]:
    """See Protocol.refuse."""
    return refusal.status, msgspec.json.encode(error(refusal))
