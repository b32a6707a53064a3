"""vLLM. Capture mode: the server renders and tokenises, and the ids that it returns are recorded. Tokens mode: it gets
the ids of the prompt beside the messages, and only parses the reply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar

import aiohttp
import structlog

from rollyard.gateway.engines.chat_upstream import chat_body, chat_chunks, probe_tokens
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, Probe, headers
from rollyard.gateway.engines.upstream import get_json
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer

log = structlog.get_logger(__name__)


class VllmEngine:
    """Speaks to vLLM, and to servers that return its fields `prompt_token_ids` and `token_ids`."""

    modes: ClassVar[frozenset[str]] = frozenset({"capture", "tokens"})

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See Engine."""
        body = chat_body(request, request.params)
        body |= {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        if request.prompt_ids is not None:
            body["kv_transfer_params"] = {"prompt_token_ids": request.prompt_ids.tolist()}
        async with aclosing(chat_chunks(self._client, request, body, with_ids=True)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def probe(self, server: LlmServer) -> Probe:
        """See Engine."""
        models = await get_json(self._client, f"{server.url}/v1/models", headers(server, "probe"))
        if models is None:
            raise ModelError(f"{server.url} has no /v1/models", hint="is this an OpenAI-compatible server?")
        entries = {entry.get("id"): entry for entry in models.get("data") or []}
        name = server.upstream_model or server.model
        if entries and name not in entries:
            raise ModelError(
                f"{server.url} does not serve {name!r} but {', '.join(sorted(map(str, entries)))}",
                hint="set upstream_model of the server's entry",
            )
        request = EngineRequest(
            call_id="probe",
            server=server,
            params={"max_tokens": 1, "temperature": 1.0},
            messages=[{"role": "user", "content": "Hi"}],
        )
        max_context = int(entries.get(name, {}).get("max_model_len") or 0)
        try:
            prompt, ids, logprobs = await probe_tokens(self.generate(request))
        except ModelError as error:
            if error.status != 400:
                raise
            # It is up but does not like this request. Every call is checked by itself.
            log.warning("probe_refused", server=server.server_id, error=str(error))
            return Probe(trainable=True, engine="vllm", max_context=max_context)
        missing = [
            what for what, there in (("prompt ids", prompt), ("sampled ids", ids), ("logprobs", logprobs)) if not there
        ]
        return Probe(
            trainable=not missing,
            reason=f"it returned no {', no '.join(missing)}" if missing else "",
            engine="vllm",
            max_context=max_context,
        )
