"""SGLang, from the source of release 0.5.23; not run against a real SGLang.

Tokens mode: ids in and ids out by its native /generate; the gateway renders and parses. Capture mode: its chat endpoint
renders, tokenises and parses, and tells the ids in an extension at the end of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Final
from uuid import uuid4

import aiohttp
import msgspec
import structlog
from msgspec import structs

from rollyard.gateway.engines.chat_upstream import ChatReader, chat_body
from rollyard.gateway.engines.constraint import constraint, json_schema
from rollyard.gateway.engines.engine import NEUTRAL_PENALTIES, EngineChunk, EngineRequest, Probe, headers
from rollyard.gateway.engines.numbers import ids_json
from rollyard.gateway.engines.probe import Findings, examine, examine_gently, logprob_kind
from rollyard.gateway.engines.sglang_generate import GenerateReader
from rollyard.gateway.engines.tokenize import tokenize
from rollyard.gateway.engines.upstream import get_json, post_chunks, post_json
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

log = structlog.get_logger(__name__)

_IDS_WANTED: Final = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}
_RENAMED: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_ABORT_TRIES: Final = 3
_ABORT_TIMEOUT_S: Final = 5.0


class SglangEngine:
    """Speaks to SGLang."""

    modes: ClassVar[frozenset[str]] = frozenset({"capture", "tokens"})

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._aborts: set[asyncio.Task[None]] = set()

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See Engine."""
        return self._generate(request)

    async def _generate(self, request: EngineRequest, *, echo: bool = False) -> AsyncGenerator[EngineChunk, None]:
        """`echo`: have the server send the ids of the prompt back in tokens mode too."""
        server = request.server
        # The scheduler refuses an id that is in use and aborts by prefix: a retry of a call must be another request.
        rid = f"{request.call_id}-{uuid4().hex[:8]}"
        sent = headers(server, request.call_id)
        reader: GenerateReader | ChatReader
        if request.prompt_ids is not None or request.prompt is not None:
            url = f"{server.url}/generate"
            body = _generate_body(request, rid, echo=echo or request.prompt_ids is None)
            reader = GenerateReader(url, resumable=request.prompt_ids is not None)
        else:
            url = f"{server.url}/v1/chat/completions"
            # Only its streams tell the ids.
            body = chat_body(
                structs.replace(request, stream=True), _whole_vocabulary(NEUTRAL_PENALTIES | request.params)
            )
            body |= {"logprobs": True, "rid": rid}
            sent |= _IDS_WANTED
            reader = ChatReader(url, with_ids=True)
        constrained = None
        if "raw" in (server.logprob_kind, request.logprob_kind):
            constrained = constraint(request.extras, tool_choice=request.prompt_ids is None)
        running = True
        try:
            async with aclosing(post_chunks(self._client, url, body, sent, reader.read)) as chunks:
                async for chunk in chunks:
                    running = chunk.finish_reason is None and running
                    yield structs.replace(chunk, constrained=constrained) if constrained else chunk
        except ModelError as error:
            # What it refused, or ended itself, does not run; of a broken connection nobody knows.
            running = running and error.status == 0
            raise
        finally:
            if running:
                self._abort_soon(server, rid)

    def _abort_soon(self, server: LlmServer, rid: str) -> None:
        """SGLang looks for closed connections only now and then."""
        task = asyncio.create_task(self._abort(server, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, server: LlmServer, rid: str) -> None:
        for left in reversed(range(_ABORT_TRIES)):
            try:
                await post_json(
                    self._client,
                    f"{server.url}/abort_request",
                    {"rid": rid},
                    headers(server, rid),
                    timeout_s=_ABORT_TIMEOUT_S,
                )
                return
            except (ModelError, RuntimeError) as error:  # RuntimeError: the gateway is stopping, its client is closed
                if not left or not isinstance(error, ModelError) or not error.retryable:
                    log.warning("abort_failed", server=server.server_id, rid=rid, error=str(error))
                    return

    async def probe(self, server: LlmServer) -> Probe:
        """See Engine."""
        # Neither the name of the model is compared, which a weight update changes, nor the deprecated twin asked.
        models = await get_json(self._client, f"{server.url}/v1/models", headers(server, "probe"))
        about = await get_json(self._client, f"{server.url}/server_info", headers(server, "probe"))
        about = about or await get_json(self._client, f"{server.url}/get_server_info", headers(server, "probe"))
        if not isinstance(about, dict):
            raise ModelError(f"{server.url} has no /server_info", hint="is this SGLang?")
        version = str(about.get("version", ""))
        findings = await examine_gently(partial(self._examine, server), server)
        entries = models.get("data") if isinstance(models, dict) else None
        max_context = entries[0].get("max_model_len") if entries and isinstance(entries[0], dict) else None
        return Probe(
            trainable=not findings.lacks,
            reason=findings.lacks,
            engine=f"sglang {version}".strip(),
            version=version,
            logprob_kind=logprob_kind(server, findings, "processed"),
            max_context=max_context if isinstance(max_context, int) else 0,
        )

    async def _examine(self, server: LlmServer, params: dict[str, Any]) -> Findings:
        sent = TokenIds.of([1, 2, 3]) if server.mode == "tokens" else None
        messages = [{"role": "user", "content": "Hi"}]
        request = EngineRequest(call_id="probe", server=server, params=params, messages=messages, prompt_ids=sent)
        return await examine(self._generate(request, echo=True), sent)

    async def count(
        self,
        server: LlmServer,
        messages: list[Message],
        tools: list[Message] | None = None,
        template: dict[str, Any] | None = None,
    ) -> int | None:
        """See Engine."""
        return len(await tokenize(self._client, server, messages, tools, template))


def _whole_vocabulary(params: dict[str, Any]) -> dict[str, Any]:
    """SGLang refuses a top_k of 0, which elsewhere means all."""
    return params | {"top_k": -1} if params.get("top_k") == 0 else params


def _generate_body(request: EngineRequest, rid: str, *, echo: bool) -> dict[str, Any]:
    params = _whole_vocabulary(NEUTRAL_PENALTIES | request.params)
    sampling = {_RENAMED.get(name, name): value for name, value in params.items()}
    # It would stop after 128 tokens by itself; null is until the context is full.
    sampling.setdefault("max_new_tokens", None)
    sampling["skip_special_tokens"] = request.prompt_ids is None
    schema = json_schema(request.extras)
    if schema is not None:
        sampling["json_schema"] = msgspec.json.encode(schema).decode()
    prompt = {"text": request.prompt} if request.prompt_ids is None else {"input_ids": ids_json(request.prompt_ids)}
    return {
        **prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_prompt_token_ids": echo,
        "stream": True,
        "rid": rid,
    }
