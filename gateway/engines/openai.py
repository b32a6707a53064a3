"""Any OpenAI-compatible server: replies without token ids, for evaluation and judges, never for training."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import aiohttp

from rollyard.gateway.engines.chat_upstream import ChatReader, chat_body
from rollyard.gateway.engines.completions_upstream import CompletionReader, completion_body
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, Probe, headers
from rollyard.gateway.engines.upstream import get_json, post_chunks
from rollyard.gateway.sampling import NEUTRAL
from rollyard.schemas.call import Message
from rollyard.schemas.fleet import LlmServer

_FOREIGN = ("top_k", "min_p")


class OpenAIEngine:
    """Speaks plain OpenAI Chat Completions, and OpenAI Completions for a bare prompt."""

    modes: ClassVar[frozenset[str]] = frozenset({"capture"})

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See Engine."""
        # OpenAI's own API refuses fields that it does not know: those go out only where somebody set them.
        params = {k: v for k, v in request.params.items() if k not in _FOREIGN or v != NEUTRAL[k]}
        reader: CompletionReader | ChatReader
        if request.prompt is not None:
            url = f"{request.server.url}/v1/completions"
            body = completion_body(request, params)
            reader = CompletionReader(url, with_ids=False, resumable=False)
        else:
            url = f"{request.server.url}/v1/chat/completions"
            body = chat_body(request, params)
            reader = ChatReader(url, with_ids=False)
        sent = post_chunks(self._client, url, body, headers(request.server, request.call_id), reader.read)
        async with aclosing(sent) as chunks:
            async for chunk in chunks:
                yield chunk

    async def probe(self, server: LlmServer) -> Probe:
        """See Engine."""
        await get_json(self._client, f"{server.url}/v1/models", headers(server, "probe"))
        return Probe(trainable=False, reason="plain OpenAI servers return no token ids", engine="openai")

    async def count(
        self,
        server: LlmServer,
        messages: list[Message],
        tools: list[Message] | None = None,
        template: dict[str, Any] | None = None,
    ) -> int | None:
        """See Engine."""
        return None
