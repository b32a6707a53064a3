"""OpenAI Chat Completions, `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message, Usage

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
_EXTRAS: Final = (
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
)


class _StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class _Body(Struct, frozen=True):
    messages: list[Message]
    model: str = ""
    tools: list[Message] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
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
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


_decode: Final = msgspec.json.Decoder(_Body, strict=False).decode


class ChatProtocol:
    """See Protocol."""

    path = "/v1/chat/completions"

    def parse(self, body: bytes) -> ModelRequest:
        """Read a request body; unknown fields are left out. Raises Refusal (400)."""
        try:
            parsed = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refusal(400, "invalid_request", f"the request body is not acceptable: {error}") from error
        _check(parsed)
        params = {name: value for name in _SAMPLING if (value := getattr(parsed, name)) is not None}
        limit = parsed.max_completion_tokens if parsed.max_completion_tokens is not None else parsed.max_tokens
        if limit is not None:
            params["max_tokens"] = limit
        if parsed.stop:
            params["stop"] = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop
        return ModelRequest(
            protocol="chat",
            model=parsed.model,
            messages=parsed.messages,
            tools=parsed.tools or None,
            params=params,
            extras={name: value for name in _EXTRAS if (value := getattr(parsed, name)) is not None},
            stream=bool(parsed.stream),
            include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        )

    def reply(self, request: ModelRequest, finished: Finished) -> bytes:
        """The body of a reply that is not streamed."""
        choice = {"index": 0, "message": finished.reply, "finish_reason": finished.finish_reason, "logprobs": None}
        return msgspec.json.encode(
            {
                "id": f"chatcmpl-{finished.call_id}",
                "object": "chat.completion",
                "created": finished.created,
                "model": request.model,
                "choices": [choice],
                "usage": _usage(finished.usage),
            }
        )

    def events(self, request: ModelRequest, update: Update) -> bytes:
        """An update as server-sent events: text at once, tool calls and finish_reason with `Finished`."""
        if isinstance(update, Started):
            return _event(_chunk(request, update, {"role": "assistant", "content": ""}))
        if isinstance(update, Delta):
            delta = {"content": update.text} if update.text else {}
            if update.reasoning:
                delta["reasoning_content"] = update.reasoning
            return _event(_chunk(request, update, delta))
        parts = []
        calls = update.reply.get("tool_calls")
        if calls:
            deltas = [{"index": index, **call} for index, call in enumerate(calls)]
            parts.append(_event(_chunk(request, update, {"tool_calls": deltas})))
        parts.append(_event(_chunk(request, update, {}, update.finish_reason)))
        if request.include_usage:
            last = _chunk(request, update, {}) | {"choices": [], "usage": _usage(update.usage)}
            parts.append(_event(last))
        return b"".join([*parts, b"data: [DONE]\n\n"])

    def error_event(self, refusal: Refusal) -> bytes:
        """An error in the middle of a stream."""
        return _event(refusal.error())


def _check(parsed: _Body) -> None:
    if not parsed.messages:
        raise Refusal(400, "invalid_request", "`messages` is empty", param="messages")
    for index, message in enumerate(parsed.messages):
        if not isinstance(message.get("role"), str):
            raise Refusal(400, "invalid_request", f"messages[{index}] has no role", param=f"messages[{index}].role")
    if parsed.n not in (None, 1):
        raise Refusal(
            400,
            "unsupported_value",
            f"n={parsed.n} is not supported",
            hint="send one request for each reply",
            param="n",
        )
    limit = parsed.max_completion_tokens if parsed.max_completion_tokens is not None else parsed.max_tokens
    if limit is not None and limit < 1:
        raise Refusal(400, "invalid_request", f"max_tokens is {limit}, it must be at least 1", param="max_tokens")


def _chunk(
    request: ModelRequest, update: Update, delta: dict[str, Any], finish_reason: str | None = None
) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{update.call_id}",
        "object": "chat.completion.chunk",
        "created": update.created,
        "model": request.model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
