"""Anthropic Messages, `/v1/messages`, as Claude Code speaks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols.messages_errors import refused
from rollyard.gateway.protocols.messages_reply import blocks_of, message, stop_of, usage_of
from rollyard.gateway.protocols.messages_request import parse_request
from rollyard.gateway.protocols.messages_stream import MessagesStream
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import WireProtocol


class MessagesProtocol:
    """See Protocol."""

    name: WireProtocol = "messages"
    path = "/v1/messages"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ModelRequest:
        """See Protocol."""
        del headers
        return parse_request(body)

    def reply(self, request: ModelRequest, finished: Sequence[Finished]) -> bytes:
        """See Protocol. This API has no n: there is one reply."""
        [only] = finished
        usage = usage_of(only.usage, only.usage.completion_tokens)
        whole = message(only.call_id, request.model, usage)
        return msgspec.json.encode({**whole, "content": blocks_of(only.reply), **stop_of(only)})

    def stream(self, request: ModelRequest) -> MessagesStream:
        """See Protocol."""
        return MessagesStream(request)

    def refuse(self, refusal: Refusal) -> tuple[int, bytes]:
        """See Protocol."""
        return refused(refusal)
