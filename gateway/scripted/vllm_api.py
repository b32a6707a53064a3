"""The endpoints of a vLLM server in dev mode that the gateway uses."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from rollyard.gateway.scripted.asked import ChatRequest, CompletionRequest
from rollyard.gateway.scripted.server import ScriptedServer, refusal
from rollyard.gateway.scripted.wire import ChatWire, CompletionWire


class VllmApi:
    """vLLM's endpoints before a scripted server."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._control = server.control

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Put the endpoints where vLLM has them."""
        self._server.add_routes(router)
        router.add_get("/version", self._version)
        router.add_get("/v1/models", self._models)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._completion)
        router.add_post("/pause", self._pause)
        router.add_post("/resume", self._resume)
        router.add_get("/is_paused", self._is_paused)
        router.add_post("/abort_requests", self._abort_requests)
        router.add_post("/collective_rpc", self._collective_rpc)
        router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        router.add_post("/update_weight_version", self._update_weight_version)
        router.add_get("/weight_info", self._weight_info)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+scripted"})

    async def _models(self, request: web.Request) -> web.Response:
        script = self._server.policy.script
        models: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "root": name,
                "parent": None,
                "max_model_len": script.max_model_len,
                "permission": [],
            }
            for name in script.models
        ]
        return web.json_response({"object": "list", "data": models})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatRequest, ChatWire)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionRequest, CompletionWire)

    async def _generate(self, request: web.Request, kind: type[Any], wire: type[Any]) -> web.StreamResponse:
        try:
            asked = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.DecodeError as error:
            return refusal(400, str(error))
        policy = self._server.policy
        limit, longest = asked.asked().max_tokens, policy.script.max_model_len
        if limit is not None and limit > longest:
            words = f"max_tokens={limit} cannot be greater than max_model_len={longest}. Please request fewer output"
            return refusal(400, f"{words} tokens. (parameter=max_tokens, value={limit})", param="max_tokens")
        if asked.model and asked.model not in policy.script.models:
            return refusal(404, f"The model `{asked.model}` does not exist.", param="model")
        if asked.n not in (None, 1):
            return refusal(400, "the scripted policy answers with one choice", param="n")
        rid = request.headers.get("x-request-id", "")
        names = {"call_id": rid or f"{time.time_ns():x}", "model": asked.model or policy.script.models[0]}
        created = int(time.time())
        return await self._server.answer(
            request, asked, lambda reply: wire(asked, reply, policy.tokenizer, created=created, **names), rid=rid
        )

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return refusal(400, f"mode {mode!r} is not abort, wait or keep", param="mode")
        await self._control.pause(abort=mode == "abort", hold=mode == "keep")
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._control.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._control.paused})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        named = (await request.json()).get("request_ids")
        # Those that a client gave: vLLM puts the name of the endpoint before them.
        prefixes = [str(name).removeprefix("chatcmpl-").removeprefix("cmpl-") for name in named] if named else [""]
        aborted = sum(self._control.abort(prefix) for prefix in prefixes)
        return web.json_response({"status": "aborted", "aborted": aborted})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        checkpoint = (call.get("kwargs") or {}).get("weights_path")
        if call.get("method") != "reload_weights" or not checkpoint:
            return refusal(500, f"the workers have no method {call.get('method')!r} for that")
        self._control.checkpoint = checkpoint
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self._control.version = str((await request.json())["new_version"])
        return web.json_response({"success": True, "new_version": self._control.version})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._control.version})
