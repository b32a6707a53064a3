"""Servers that take OpenAI Chat Completions and tokenise themselves: the request, and the events of their stream.

Shared by vLLM, SGLang and the generic OpenAI adapter, which differ in what they ask for and believe.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from rollyard.gateway.engines.engine import EngineChunk, EngineRequest
from rollyard.gateway.engines.numbers import pack_ids, pack_logprobs, parse_ids
from rollyard.gateway.engines.upstream import raise_event_error, read_event
from rollyard.schemas.call import Usage
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import Logprobs, TokenIds

NULL: Final = Raw(b"null")


class _Token(Struct, frozen=True):
    logprob: Any = None


class _Logprobs(Struct, frozen=True):
    content: list[_Token] | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta | None = None
    message: _Delta | None = None
    token_ids: Any = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class UsageBlock(Struct, frozen=True):
    """`usage` of OpenAI's streams."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        """As our record has it."""
        details = self.prompt_tokens_details or _Details()
        return Usage(
            prompt_tokens=self.prompt_tokens or 0,
            completion_tokens=self.completion_tokens or 0,
            cached_tokens=details.cached_tokens or 0,
        )


class _SglExt(Struct, frozen=True):
    input_ids: Raw = NULL
    output_ids: list[Raw] | None = None


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: UsageBlock | None = None
    prompt_token_ids: Raw = NULL
    sglext: _SglExt | None = None
    error: Any = None


STREAMED: Final[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
_decode: Final = msgspec.json.Decoder(_Chunk).decode


def chat_body(request: EngineRequest, params: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that reports its usage, streamed or not."""
    body: dict[str, Any] = {
        **request.extras,
        **params,
        "model": upstream_model(request),
        "messages": request.messages,
        **(STREAMED if request.stream else {}),
    }
    if request.tools:
        body["tools"] = request.tools
    return body


def upstream_model(request: EngineRequest) -> str:
    """The name by which the server knows its model."""
    return request.server.upstream_model or request.server.model


class ChatReader:
    """Reads the events of one chat completion from `url`. Ids and logprobs are only believed `with_ids`."""

    def __init__(self, url: str, *, with_ids: bool, constrained: str | None = None) -> None:
        self._url = url
        self._with_ids = with_ids
        self._constrained = constrained

    def read(self, event: bytes) -> EngineChunk:
        """What an event adds. Raises ModelError."""
        chunk = read_event(_decode, event, self._url)
        raise_event_error(chunk.error, self._url)
        choice = chunk.choices[0] if chunk.choices else _Choice()
        if choice.finish_reason == "abort":
            raise aborted(self._url)
        delta = choice.delta or choice.message or _Delta()
        ids, prompt_ids, fault = self._ids(chunk, choice)
        return EngineChunk(
            text=delta.content or "",
            reasoning=delta.reasoning_content or delta.reasoning or "",
            tool_calls=delta.tool_calls or [],
            token_ids=ids,
            logprobs=self._logprobs(choice),
            prompt_ids=prompt_ids,
            finish_reason=choice.finish_reason,
            stop_string=stop_string(choice.stop_reason, choice.matched_stop),
            usage=chunk.usage.usage() if chunk.usage is not None else None,
            fault=fault,
            constrained=self._constrained,
        )

    def _ids(self, chunk: _Chunk, choice: _Choice) -> tuple[TokenIds | None, TokenIds | None, str | None]:
        if not self._with_ids:
            return None, None, None
        extension = chunk.sglext or _SglExt()
        try:
            ids = None if choice.token_ids is None else pack_ids(choice.token_ids)
            if extension.output_ids:
                ids = parse_ids(extension.output_ids[0])
            prompt_ids = parse_ids(chunk.prompt_token_ids)
            return ids, parse_ids(extension.input_ids) if prompt_ids is None else prompt_ids, None
        except ValueError as error:
            return None, None, f"the server returned ids that are none: {error}"

    def _logprobs(self, choice: _Choice) -> Logprobs | None:
        if not self._with_ids or choice.logprobs is None or choice.logprobs.content is None:
            return None
        return pack_logprobs(token.logprob for token in choice.logprobs.content)


def aborted(url: str) -> ModelError:
    """A reply that was ended by the server's operator, where it cannot be continued."""
    return ModelError(f"{url} aborted the call", hint="its weights were being changed", retryable=True)


def stop_string(*reasons: Any) -> str | None:
    """The first reason that is a text. Servers give the id instead where a token ended the reply."""
    for reason in reasons:
        if isinstance(reason, str):
            return reason
    return None
