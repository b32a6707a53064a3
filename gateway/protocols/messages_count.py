"""`/v1/messages/count_tokens`: how long the prompt of a request would be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import structs

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.protocols.messages_request import parse_request

COUNT_PATH: Final = "/v1/messages/count_tokens"


def parse_count(body: bytes, headers: Mapping[str, str]) -> ModelRequest:
    """Read a request to count: the body of a request for a reply. Raises Refusal (400)."""
    del headers
    return structs.replace(parse_request(body), scenario="count", stream=False)


def count_reply(tokens: int) -> bytes:
    """The body of the answer."""
    return msgspec.json.encode({"input_tokens": tokens})
