"""The ids of a conversation, by the /tokenize that vLLM and SGLang share."""

from __future__ import annotations

from typing import Any, Final

import aiohttp

from rollyard.gateway.engines.engine import headers
from rollyard.gateway.engines.numbers import pack_ids
from rollyard.gateway.engines.upstream import post_json
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

_TIMEOUT_S: Final = 10.0


async def tokenize(
    client: aiohttp.ClientSession,
    server: LlmServer,
    messages: list[Message],
    tools: list[Message] | None,
    template: dict[str, Any] | None = None,
) -> TokenIds:
    """The prompt of a conversation as ids. Raises ModelError."""
    url = f"{server.url}/tokenize"
    body: dict[str, Any] = {"model": server.upstream_model or server.model, "messages": messages}
    if tools:
        body["tools"] = tools
    if template:
        body["chat_template_kwargs"] = template
    answer = await post_json(client, url, body, headers(server, "tokenize"), timeout_s=_TIMEOUT_S)
    try:
        return pack_ids(answer["tokens"])
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{url} returned no ids: {error}", hint="is this vLLM or SGLang?") from error
