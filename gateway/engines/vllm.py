"""vLLM. Tokens mode: ids in and ids out by /v1/completions; the gateway renders and parses.

Capture mode: its chat endpoint renders, tokenises and parses, and the ids that it returns are recorded.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, ClassVar, Final

import aiohttp
import structlog

from rollyard.gateway.engines.chat_upstream import ChatReader, chat_body, upstream_model
from rollyard.gateway.engines.completions_upstream import CompletionReader, completion_body
from rollyard.gateway.engines.constraint import constraint
from rollyard.gateway.engines.engine import NEUTRAL_PENALTIES, EngineChunk, EngineRequest, Probe, headers
from rollyard.gateway.engines.probe import CERTAIN, Findings, examine, examine_gently, logprob_kind
from rollyard.gateway.engines.tokenize import tokenize
from rollyard.gateway.engines.upstream import get_json, post_chunks
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

log = structlog.get_logger(__name__)

_SOME_IDS: Final = TokenIds.of([1, 2, 3])


class VllmEngine:
    """Speaks to vLLM, and to servers that have its fields `token_ids`, `prompt_token_ids` and `token_id:N`."""

    modes: ClassVar[frozenset[str]] = frozenset({"capture", "tokens"})

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See Engine."""
        return self._generate(request)

    def _generate(self, request: EngineRequest, *, echo: bool = False) -> AsyncGenerator[EngineChunk, None]:
        """`echo`: have the server send the ids of the prompt back in tokens mode too."""
        params = NEUTRAL_PENALTIES | request.params
        # Processed logprobs are taken behind the grammar's mask.
        raw = "processed" not in (request.server.logprob_kind, request.logprob_kind)
        reader: CompletionReader | ChatReader
        if request.prompt_ids is not None or request.prompt is not None:
            url = f"{request.server.url}/v1/completions"
            tokens = request.prompt_ids is not None
            body = _completion_body(request, params, echo=echo or not tokens)
            constrained = constraint(request.extras) if raw else None
            reader = CompletionReader(url, with_ids=True, resumable=tokens, constrained=constrained)
        else:
            url = f"{request.server.url}/v1/chat/completions"
            body = chat_body(request, params) | {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
            constrained = constraint(request.extras, tool_choice=True) if raw else None
            reader = ChatReader(url, with_ids=True, constrained=constrained)
        return post_chunks(self._client, url, body, headers(request.server, request.call_id), reader.read)

    async def probe(self, server: LlmServer) -> Probe:
        """See Engine."""
        entry = await self._model(server)
        about = await get_json(self._client, f"{server.url}/version", headers(server, "probe"))
        version = str(about.get("version", "")) if isinstance(about, dict) else ""
        max_context = entry.get("max_model_len")
        findings = await examine_gently(partial(self._examine, server), server, CERTAIN)
        return Probe(
            trainable=not findings.lacks,
            reason=findings.lacks,
            engine=f"vllm {version}".strip(),
            version=version,
            logprob_kind=logprob_kind(server, findings, "raw"),
            max_context=max_context if isinstance(max_context, int) else 0,
        )

    async def _model(self, server: LlmServer) -> dict[str, Any]:
        models = await get_json(self._client, f"{server.url}/v1/models", headers(server, "probe"))
        if not isinstance(models, dict):
            raise ModelError(f"{server.url} has no /v1/models", hint="is this an OpenAI-compatible server?")
        entries = {entry.get("id"): entry for entry in models.get("data") or [] if isinstance(entry, dict)}
        name = upstream_model(EngineRequest(call_id="probe", server=server))
        if entries and name not in entries:
            raise ModelError(
                f"{server.url} does not serve {name!r} but {', '.join(sorted(map(str, entries)))}",
                hint="set upstream_model of the server's entry",
            )
        return entries.get(name, {})

    async def _examine(self, server: LlmServer, params: dict[str, Any]) -> Findings:
        messages = [{"role": "user", "content": "Hi"}]
        sent = await self._ids(server, messages) if server.mode == "tokens" else None
        request = EngineRequest(call_id="probe", server=server, params=params, messages=messages, prompt_ids=sent)
        return await examine(self._generate(request, echo=True), sent)

    async def _ids(self, server: LlmServer, messages: list[Message]) -> TokenIds:
        """Some prompt that the model knows; any ids where the server has no /tokenize."""
        try:
            return await tokenize(self._client, server, messages, None) or _SOME_IDS
        except ModelError as error:
            log.debug("probe_without_tokenize", server=server.server_id, error=str(error))
            return _SOME_IDS

    async def count(
        self,
        server: LlmServer,
        messages: list[Message],
        tools: list[Message] | None = None,
        template: dict[str, Any] | None = None,
    ) -> int | None:
        """See Engine."""
        return len(await tokenize(self._client, server, messages, tools, template))


def _completion_body(request: EngineRequest, params: dict[str, Any], *, echo: bool) -> dict[str, Any]:
    body = completion_body(request, params) | {"logprobs": 0, "return_tokens_as_token_ids": True}
    if echo:
        body["return_token_ids"] = True
    if request.prompt_ids is not None:
        # Marks of tool calls are special tokens in some models, and stop strings may be in them.
        body["skip_special_tokens"] = False
        if "max_tokens" not in body:
            raise ModelError(
                f"how long a reply of {request.server.server_id} may be is not known: vLLM would cut it at 16 tokens",
                hint="set max_context of the server's entry",
            )
    return body
