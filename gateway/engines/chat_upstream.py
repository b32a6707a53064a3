"""Servers that take OpenAI Chat Completions and tokenise themselves: the request, and their stream read.

Shared by the vLLM and the generic OpenAI adapter, which differ in what they ask for and believe.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import aiohttp
import msgspec
from msgspec import Raw, Struct

from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, headers
from rollyard.gateway.engines.upstream import parse_ids, post_stream, raise_event_error
from rollyard.schemas.call import Usage
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import Logprobs, TokenIds

_NULL: Final = Raw(b"null")


class _Token(Struct, frozen=True):
    logprob: float | None = None


class _Logprobs(Struct, frozen=True):
    content: list[_Token] | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    token_ids: Raw = _NULL
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: Raw = _NULL
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


def chat_body(request: EngineRequest, params: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that streams and reports its usage."""
    server = request.server
    body: dict[str, Any] = {
        **request.extras,
        **params,
        "model": server.upstream_model or server.model,
        "messages": request.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = request.tools
    return body


async def chat_chunks(
    client: aiohttp.ClientSession, request: EngineRequest, body: dict[str, Any], *, with_ids: bool
) -> AsyncGenerator[EngineChunk, None]:
    """Send `body` and read the stream. Ids and logprobs are only read `with_ids`. Raises ModelError."""
    url = f"{request.server.url}/v1/chat/completions"
    ended = False
    stream = post_stream(client, url, body, headers(request.server, request.call_id))
    async with aclosing(stream) as events:
        async for event in events:
            try:
                chunk = _decode(event)
            except msgspec.MsgspecError as error:
                raise ModelError(f"{url} sent an event that cannot be read: {error}") from error
            raise_event_error(chunk.error, url)
            piece = _engine_chunk(chunk, with_ids)
            if piece.finish_reason == "abort":
                raise ModelError(f"{url} aborted the call", hint="its weights were being changed", retryable=True)
            ended = ended or piece.finish_reason is not None
            yield piece
    if not ended:
        raise ModelError(f"{url} broke off its reply", retryable=True)


def _engine_chunk(chunk: _Chunk, with_ids: bool) -> EngineChunk:
    choice = chunk.choices[0] if chunk.choices else _Choice()
    ids = prompt_ids = logprobs = fault = None
    if with_ids:
        try:
            prompt_ids, ids = parse_ids(chunk.prompt_token_ids), parse_ids(choice.token_ids)
        except ValueError as error:
            fault = f"the server returned ids that are none: {error}"
        logprobs = _logprobs(choice)
    usage = None
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details or _Details()
        usage = Usage(
            prompt_tokens=chunk.usage.prompt_tokens,
            completion_tokens=chunk.usage.completion_tokens,
            cached_tokens=details.cached_tokens or 0,
        )
    delta = choice.delta
    return EngineChunk(
        text=delta.content or "",
        reasoning=delta.reasoning_content or delta.reasoning or "",
        tool_calls=delta.tool_calls or [],
        token_ids=ids,
        logprobs=logprobs,
        prompt_ids=prompt_ids,
        finish_reason=choice.finish_reason,
        usage=usage,
        fault=fault,
    )


def _logprobs(choice: _Choice) -> Logprobs | None:
    if choice.logprobs is None or choice.logprobs.content is None:
        return None
    values = (float("nan") if token.logprob is None else token.logprob for token in choice.logprobs.content)
    return Logprobs.of(values)


async def probe_tokens(
    chunks: AsyncGenerator[EngineChunk, None],
) -> tuple[TokenIds, TokenIds, Logprobs]:
    """All prompt ids, sampled ids and logprobs of a probe's reply."""
    prompt, ids, logprobs = TokenIds(), TokenIds(), Logprobs()
    async with aclosing(chunks):
        async for chunk in chunks:
            prompt += chunk.prompt_ids or TokenIds()
            ids += chunk.token_ids or TokenIds()
            logprobs += chunk.logprobs or Logprobs()
    return prompt, ids, logprobs
