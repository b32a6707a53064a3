"""What an agent's protocol is to the gateway: a translation into and out of gateway/exchange.py. One file for each."""

from __future__ import annotations

from typing import Protocol as TypingProtocol

from rollyard.gateway.exchange import Finished, ModelRequest, Update
from rollyard.gateway.refusal import Refusal


class Protocol(TypingProtocol):
    """An adapter. It does no I/O and keeps no state."""

    path: str
    """Route of the endpoint, for example `/v1/chat/completions`."""

    def parse(self, body: bytes) -> ModelRequest:
        """Read a request body. Raises Refusal (400) and never refuses a field that it does not know."""
        ...

    def reply(self, request: ModelRequest, finished: Finished) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def events(self, request: ModelRequest, update: Update) -> bytes:
        """An update as server-sent events; may be empty. Nothing that an agent acts on stands before `Finished`."""
        ...

    def error_event(self, refusal: Refusal) -> bytes:
        """An error in the middle of a stream, which is cut after it."""
        ...
