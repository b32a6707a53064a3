"""llama.cpp's server in tokens mode: ids in, ids and logprobs out, by its native /completion.

Its chat endpoint never returns prompt ids, and what it calls content need not be what was sampled.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Final

import aiohttp
import msgspec
from msgspec import Struct

from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, Probe, headers
from rollyard.gateway.engines.upstream import get_json, post_stream, raise_event_error
from rollyard.schemas.call import Usage
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds

_FINISH: Final = {"eos": "stop", "word": "stop", "limit": "length"}
_PASSED: Final = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


class _Token(Struct, frozen=True):
    id: int
    logprob: float | None = None


class _Timings(Struct, frozen=True):
    cache_n: int = 0


class _Chunk(Struct, frozen=True):
    content: str = ""
    tokens: list[int] = []
    completion_probabilities: list[_Token] = []
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    stop: bool = False
    stop_type: str = ""
    timings: _Timings = _Timings()
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class LlamaCppEngine:
    """Speaks to llama.cpp's server."""

    modes: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See Engine."""
        assert request.prompt_ids is not None, "llama.cpp is only spoken to in tokens mode"
        url = f"{request.server.url}/completion"
        body = _body(request.prompt_ids, request.params)
        received, ended = 0, False
        stream = post_stream(self._client, url, body, headers(request.server, request.call_id))
        async with aclosing(stream) as events:
            async for event in events:
                chunk = _read(event, url)
                received += len(chunk.tokens)
                ended = ended or chunk.stop
                yield _engine_chunk(chunk, received)
        if not ended:
            raise ModelError(f"{url} broke off its reply", retryable=True)

    async def probe(self, server: LlmServer) -> Probe:
        """See Engine."""
        if await get_json(self._client, f"{server.url}/health") is None:
            raise ModelError(f"{server.url} has no /health", hint="is this llama.cpp's server?")
        models = await get_json(self._client, f"{server.url}/v1/models")
        meta: dict[str, Any] = {}
        if isinstance(models, dict) and models.get("data"):
            meta = models["data"][0].get("meta") or {}
        request = EngineRequest(call_id="probe", server=server, params={"max_tokens": 1}, prompt_ids=TokenIds.of([1]))
        ids, logprobs = 0, 0
        async with aclosing(self.generate(request)) as chunks:
            async for chunk in chunks:
                ids += len(chunk.token_ids or ())
                logprobs += len(chunk.logprobs or ())
        trainable = ids > 0 and ids == logprobs
        return Probe(
            trainable=trainable,
            reason="" if trainable else "it returned no token ids with logprobs",
            engine="llamacpp",
            vocab_size=int(meta.get("n_vocab") or 0),
            max_context=int(meta.get("n_ctx") or 0),
        )


def _body(prompt_ids: TokenIds, params: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {name: params[name] for name in _PASSED if name in params}
    return body | {
        "prompt": prompt_ids.tolist(),
        "n_predict": params.get("max_tokens", -1),
        "n_probs": 1,
        "return_tokens": True,
        "stream": True,
        "cache_prompt": True,
    }


def _read(event: bytes, url: str) -> _Chunk:
    try:
        chunk = _decode(event)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{url} sent an event that cannot be read: {error}", hint="is this llama.cpp?") from error
    raise_event_error(chunk.error, url)
    return chunk


def _engine_chunk(chunk: _Chunk, received: int) -> EngineChunk:
    fault = None
    sampled = chunk.completion_probabilities
    if [token.id for token in sampled] != chunk.tokens:
        fault = "llama.cpp returned ids without their logprobs"
    if chunk.tokens_predicted != received:
        # It reports no part of a character that several tokens make up, except the last.
        fault = f"llama.cpp reported {received} of {chunk.tokens_predicted} sampled ids (a character of several tokens)"
    usage = None
    if chunk.stop:
        usage = Usage(
            prompt_tokens=chunk.tokens_evaluated,
            completion_tokens=chunk.tokens_predicted,
            cached_tokens=chunk.timings.cache_n,
        )
    return EngineChunk(
        text=chunk.content,
        token_ids=TokenIds.of(chunk.tokens),
        logprobs=Logprobs.of([float("nan") if t.logprob is None else t.logprob for t in sampled]),
        finish_reason=_FINISH.get(chunk.stop_type, "stop") if chunk.stop else None,
        usage=usage,
        fault=fault,
    )
