"""How many tokens a request has, without a call: by the renderer of a server in tokens mode, else by the server."""

from __future__ import annotations

from rollyard.gateway.calls import Gateway
from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.history import without_private
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.planning import rendering
from rollyard.gateway.refusal import Refusal


async def count_tokens(gateway: Gateway, grant: SessionGrant, request: ModelRequest) -> int:
    """Tokens of the prompt, exact. Raises Refusal: 400 where neither a tokenizer nor the server can tell."""
    entry = await gateway.pool.choose(
        gateway.model_of(grant, request), grant.session(), training=False, wait_s=gateway.settings.pause_wait_s
    )
    counted: int | None = None
    with rendering(entry):
        if entry.server.mode == "capture":
            engine = gateway.engines[entry.server.engine]
            messages = without_private(request.messages)
            counted = await engine.count(entry.server, messages, request.tools, request.template_options)
        if counted is None and entry.server.tokenizer:
            counted = await (await gateway.renderers.get(entry.server.tokenizer)).count(request)
    if counted is None:
        raise Refusal(
            400,
            "cannot_count",
            f"model server {entry.server.server_id} cannot count tokens",
            hint="give its tokenizer: rollyard llm add --tokenizer",
        )
    return counted
