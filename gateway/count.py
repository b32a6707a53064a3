"""How many tokens a request has, without a call: by the renderer of a server in tokens mode, else by the server."""

from __future__ import annotations

from rollyard.gateway.calls import Gateway
from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.history import without_private
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.refusal import Refusal, unavailable
from rollyard.schemas.errors import ConfigError, ModelError


async def count_tokens(gateway: Gateway, grant: SessionGrant, request: ModelRequest) -> int:
    """Tokens of the prompt, exact. Raises Refusal: 400 where neither a tokenizer nor the server can tell."""
    entry = await gateway.pool.choose(
        gateway.model_of(grant, request), grant.session(), training=False, wait_s=gateway.settings.pause_wait_s
    )
    try:
        if entry.server.mode == "tokens":
            return await (await gateway.renderers.get(entry.server.tokenizer)).count(request)
        counted: int | None = await gateway.engines[entry.server.engine].count(
            entry.server,
            without_private(request.messages),
            request.tools,
            request.extras.get("chat_template_kwargs"),
        )
        if counted is None and entry.server.tokenizer:
            return await (await gateway.renderers.get(entry.server.tokenizer)).count(request)
    except ConfigError as error:
        raise unavailable(f"model server {entry.server.server_id}: {error}", code="no_tokenizer") from error
    except ModelError as error:
        raise Refusal(400, "invalid_messages", error.message, hint=error.hint, param="messages") from error
    if counted is None:
        raise Refusal(
            400,
            "cannot_count",
            f"model server {entry.server.server_id} cannot count tokens",
            hint="give its tokenizer: rollyard llm add --tokenizer",
        )
    return counted
