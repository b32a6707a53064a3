"""OpenAI Chat Completions, `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message, WireProtocol

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

    name: WireProtocol = "chat"
    path = "/v1/chat/completions"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ModelRequest:
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

    def reply(self, request: ModelRequest, finished: Sequence[Finished]) -> bytes:
        """The body of a reply that is not streamed."""
        first = finished[0]
        return msgspec.json.encode(
            {
                "id": f"chatcmpl-{first.call_id}",
                "object": "chat.completion",
                "created": first.created,
                "model": request.model,
                "choices": [
                    {"index": each.choice, "message": each.reply, "finish_reason": each.finish_reason, "logprobs": None}
                    for each in finished
                ],
                "usage": _usage(finished),
            }
        )

    def stream(self, request: ModelRequest) -> ChatStream:
        """See Protocol."""
        return ChatStream(request)

    def refuse(self, refusal: Refusal) -> tuple[int, bytes]:
        """See Protocol."""
        return refusal.status, refusal.body()


class ChatStream:
    """See ReplyStream. Text goes out at once, tool calls and finish_reason with `Finished`."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._id = ""
        self._finished: list[Finished] = []

    def events(self, update: Update) -> bytes:
        """See ReplyStream."""
        self._id = self._id or update.call_id
        match update:
            case Waiting():
                return self.ping()
            case Started():
                return self._chunk(update, {"role": "assistant", "content": ""})
            case Delta():
                delta = {"content": update.text} if update.text else {}
                if update.reasoning:
                    delta["reasoning_content"] = update.reasoning
                return self._chunk(update, delta)
            case Finished():
                return self._end(update)

    def ping(self) -> bytes:
        """See ReplyStream."""
        return b": ping\n\n"

    def error(self, refusal: Refusal) -> bytes:
        """See ReplyStream."""
        return _event(refusal.error())

    def _end(self, finished: Finished) -> bytes:
        self._finished.append(finished)
        parts = []
        calls = finished.reply.get("tool_calls")
        if calls:
            deltas = [{"index": index, **call} for index, call in enumerate(calls)]
            parts.append(self._chunk(finished, {"tool_calls": deltas}))
        parts.append(self._chunk(finished, {}, finished.finish_reason))
        if len(self._finished) == self._request.n:
            if self._request.include_usage:
                parts.append(_event(self._body(finished, [], usage=_usage(self._finished))))
            parts.append(b"data: [DONE]\n\n")
        return b"".join(parts)

    def _chunk(self, update: Update, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": update.choice, "delta": delta, "finish_reason": finish_reason}
        return _event(self._body(update, [choice]))

    def _body(self, update: Update, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._id}",
            "object": "chat.completion.chunk",
            "created": update.created,
            "model": self._request.model,
            "choices": choices,
            **more,
        }


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


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(finished: Sequence[Finished]) -> dict[str, Any]:
    prompt = finished[0].usage.prompt_tokens
    completion = sum(each.usage.completion_tokens for each in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": finished[0].usage.cached_tokens},
    }
