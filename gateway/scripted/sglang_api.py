"""The endpoints of an SGLang server that the gateway uses. From the source of SGLang 0.5.23."""

from __future__ import annotations

import time
from uuid import uuid4

import msgspec
from aiohttp import web

from rollyard.gateway.scripted.asked import ChatRequest, GenerateRequest
from rollyard.gateway.scripted.policy import Reply
from rollyard.gateway.scripted.server import ScriptedServer, refusal
from rollyard.gateway.scripted.sglang_wire import GenerateWire, SglangChatWire


class SglangApi:
    """SGLang's endpoints before a scripted server."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._control = server.control

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Put the endpoints where SGLang has them."""
        self._server.add_routes(router)
        router.add_get("/server_info", self._server_info)
        router.add_get("/model_info", self._model_info)
        router.add_get("/v1/models", self._models)
        router.add_post("/generate", self._generate)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/pause_generation", self._pause)
        router.add_post("/continue_generation", self._continue)
        router.add_post("/abort_request", self._abort_request)
        router.add_post("/update_weights_from_disk", self._update_weights)
        router.add_post("/update_weight_version", self._update_weight_version)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23+scripted", "model_path": self._name(), "internal_states": []})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self._name(), "weight_version": self._control.version})

    async def _models(self, request: web.Request) -> web.Response:
        length = self._server.policy.script.max_model_len
        model = {"id": self._name(), "object": "model", "owned_by": "sglang", "max_model_len": length}
        return web.json_response({"object": "list", "data": [model]})

    def _name(self) -> str:
        """SGLang calls its model by the path of the weights that it has read last."""
        return self._control.checkpoint or self._server.policy.script.models[0]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
        except msgspec.DecodeError as error:
            return refusal(400, str(error))
        if asked.input_ids is None and asked.text is None:
            return refusal(400, "Either text, input_ids or input_embeds should be provided.")
        if asked.sampling_params.top_k == 0:
            return refusal(400, "top_k must be -1 (disable) or at least 1, got 0.")
        rid = asked.rid or uuid4().hex
        return await self._server.answer(
            request, asked, lambda reply: GenerateWire(asked, reply, rid=rid, version=self._version), rid=rid
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = msgspec.json.decode(await request.read(), type=ChatRequest)
        except msgspec.DecodeError as error:
            return refusal(400, str(error))
        if asked.stream and asked.return_token_ids:
            return refusal(400, "return_token_ids is not supported with stream=true.")
        rid = asked.rid or uuid4().hex
        created = int(time.time())
        wanted = {
            name: request.headers.get(f"x-sglext-return-{name.replace('_', '-')}") == "1"
            for name in ("input_ids", "output_ids")
        }

        def wire(reply: Reply) -> SglangChatWire:
            tokenizer = self._server.policy.tokenizer
            return SglangChatWire(asked, reply, tokenizer, rid=rid, created=created, version=self._version, **wanted)

        return await self._server.answer(request, asked, wire, rid=rid)

    def _version(self) -> str:
        return self._control.version

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return refusal(400, f"mode {mode!r} is not abort, retract or in_place")
        await self._control.pause(abort=mode == "abort", hold=mode != "abort")
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._control.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid = str(body.get("rid") or "")
        if rid or body.get("abort_all"):
            self._control.abort("" if body.get("abort_all") else rid)
        return web.Response()

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._control.checkpoint = str(body["model_path"])
        if body.get("weight_version") is not None:
            self._control.version = str(body["weight_version"])
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self._control.abort()
        self._control.version = str(body["new_version"])
        return web.json_response({"success": True, "new_version": self._control.version})
