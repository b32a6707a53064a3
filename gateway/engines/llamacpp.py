"""llama.cpp's server in tokens mode: ids in, ids and logprobs out, by its native /completion.

Its chat endpoint never returns prompt ids, and what it calls content need not be what was sampled.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Final

import aiohttp
import msgspec
from msgspec import Raw, Struct

from rollyard.gateway.engines.chat_upstream import NULL, stop_string
from rollyard.gateway.engines.constraint import constraint, json_schema
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, Probe, headers
from rollyard.gateway.engines.numbers import ids_json, pack_logprobs, parse_ids
from rollyard.gateway.engines.probe import Findings, examine, examine_gently, logprob_kind
from rollyard.gateway.engines.upstream import get_json, post_chunks, post_json, raise_event_error, read_event
from rollyard.schemas.call import Message, Usage
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

_FINISH: Final = {"eos": "stop", "word": "stop", "limit": "length"}
_PASSED: Final = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
# Whoever started the server may have set other defaults, and they cut what can be sampled.
_NEUTRAL: Final = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_penalty": 1.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
}
_LAST_FIELDS: Final = (
    *("content", "tokens", "stop", "stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated"),
    *("completion_probabilities", "timings"),
)
_COUNT_TIMEOUT_S: Final = 10.0
_PROBED_IDS: Final = (1, 2, 3)


class _Token(Struct, frozen=True):
    id: Any = None
    logprob: Any = None


class _Timings(Struct, frozen=True):
    cache_n: int = 0


class _Chunk(Struct, frozen=True):
    content: str = ""
    tokens: Raw = NULL
    completion_probabilities: list[_Token] = []
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    stop: bool = False
    stop_type: str = ""
    stopping_word: str = ""
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
        url = f"{request.server.url}/completion"
        reader = CompletionReader(url, constrained=constraint(request.extras))
        sent = post_chunks(self._client, url, _body(request), headers(request.server, request.call_id), reader.read)
        async with aclosing(sent) as chunks:
            async for chunk in chunks:
                yield chunk

    async def probe(self, server: LlmServer) -> Probe:
        """See Engine."""
        if await get_json(self._client, f"{server.url}/health") is None:
            raise ModelError(f"{server.url} has no /health", hint="is this llama.cpp's server?")
        models = await get_json(self._client, f"{server.url}/v1/models", headers(server, "probe"))
        about = await get_json(self._client, f"{server.url}/props", headers(server, "probe"))
        version = str(about.get("build_info") or "") if isinstance(about, dict) else ""
        meta: dict[str, Any] = {}
        if isinstance(models, dict) and models.get("data"):
            meta = models["data"][0].get("meta") or {}
        findings = await examine_gently(partial(self._examine, server), server)
        return Probe(
            trainable=not findings.lacks,
            reason=findings.lacks,
            engine=f"llamacpp {version}".strip(),
            version=version,
            logprob_kind=logprob_kind(server, findings, "raw"),
            vocab_size=int(meta.get("n_vocab") or 0),
            max_context=int(meta.get("n_ctx") or 0),
        )

    async def _examine(self, server: LlmServer, params: dict[str, Any]) -> Findings:
        sent = TokenIds.of(_PROBED_IDS)
        request = EngineRequest(call_id="probe", server=server, params=params, prompt_ids=sent)
        # It counts the prompt but does not tell its ids.
        return await examine(self.generate(request), counted=len(sent))

    async def count(
        self,
        server: LlmServer,
        messages: list[Message],
        tools: list[Message] | None = None,
        template: dict[str, Any] | None = None,
    ) -> int | None:
        """See Engine."""
        sent = headers(server, "count")
        asked: dict[str, Any] = {"messages": messages} | ({"tools": tools} if tools else {})
        asked |= {"chat_template_kwargs": template} if template else {}
        rendered = await post_json(
            self._client, f"{server.url}/apply-template", asked, sent, timeout_s=_COUNT_TIMEOUT_S
        )
        text = rendered.get("prompt") if isinstance(rendered, dict) else None
        if not isinstance(text, str):
            return None
        asked = {"content": text, "add_special": True, "parse_special": True}
        answer = await post_json(self._client, f"{server.url}/tokenize", asked, sent, timeout_s=_COUNT_TIMEOUT_S)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        return len(ids) if isinstance(ids, list) else None


class CompletionReader:
    """Reads the events of one reply."""

    def __init__(self, url: str, *, constrained: str | None = None) -> None:
        self._url = url
        self._constrained = constrained
        self._received = 0

    def read(self, event: bytes) -> EngineChunk:
        """What an event adds. Raises ModelError."""
        chunk = read_event(_decode, event, self._url)
        raise_event_error(chunk.error, self._url)
        sampled = chunk.completion_probabilities
        ids, fault = TokenIds(), None
        try:
            ids = parse_ids(chunk.tokens) or TokenIds()
        except ValueError as error:
            fault = f"llama.cpp returned ids that are none: {error}"
        self._received += len(ids)
        if fault is None and [token.id for token in sampled] != ids.tolist():
            fault = "llama.cpp returned ids without their logprobs"
        if fault is None and chunk.tokens_predicted != self._received:
            # It reports no part of a character that several tokens make up, except the last.
            told = f"{self._received} of {chunk.tokens_predicted}"
            fault = f"llama.cpp reported {told} sampled ids (a character of several tokens)"
        usage = None
        if chunk.stop:
            usage = Usage(
                prompt_tokens=chunk.tokens_evaluated,
                completion_tokens=chunk.tokens_predicted,
                cached_tokens=chunk.timings.cache_n,
            )
        return EngineChunk(
            text=chunk.content,
            token_ids=ids,
            logprobs=pack_logprobs(token.logprob for token in sampled),
            finish_reason=_FINISH.get(chunk.stop_type, "stop") if chunk.stop else None,
            stop_string=stop_string(chunk.stopping_word or None),
            usage=usage,
            fault=fault,
            constrained=self._constrained,
        )


def _body(request: EngineRequest) -> dict[str, Any]:
    params = request.params
    body = _NEUTRAL | {name: params[name] for name in _PASSED if name in params}
    if "repetition_penalty" in params:
        body["repeat_penalty"] = params["repetition_penalty"]
    if any(body[name] != _NEUTRAL[name] for name in ("presence_penalty", "frequency_penalty", "repeat_penalty")):
        # Everywhere else penalties look at the whole reply, here at 64 tokens unless asked for more.
        body["repeat_last_n"] = -1
    if params.get("logit_bias"):
        body["logit_bias"] = _biases(params["logit_bias"])
    schema = json_schema(request.extras)
    if schema is not None:
        body["json_schema"] = schema
    if request.prompt_ids is None and request.prompt is None:
        raise ModelError("llama.cpp is only spoken to in tokens mode", hint="set mode of the server's entry to tokens")
    return body | {
        "prompt": request.prompt if request.prompt_ids is None else ids_json(request.prompt_ids),
        "n_predict": params.get("max_tokens", -1),
        "n_probs": 1,
        "return_tokens": True,
        "stream": True,
        "cache_prompt": True,
        # Else its last event repeats the prompt as text.
        "response_fields": _LAST_FIELDS,
    }


def _biases(asked: dict[str, Any]) -> list[tuple[int, float]]:
    try:
        return [(int(token), float(bias)) for token, bias in asked.items()]
    except (TypeError, ValueError) as error:
        raise ModelError(f"logit_bias takes ids and numbers: {error}", hint="give token ids", status=400) from error
