"""What an agent's protocol is to the gateway: a translation into and out of gateway/exchange.py. One file for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol as TypingProtocol

from rollyard.gateway.exchange import Finished, ModelRequest, Update
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import WireProtocol


class ReplyStream(TypingProtocol):
    """One reply on its way out as server-sent events. It may keep state; it does no I/O."""

    def events(self, update: Update) -> bytes:
        """An update as events; may be empty. Nothing that an agent acts on stands before `Finished`.

        Agents run a tool call even if the stream then breaks, so what completes one waits for `Finished`.
        """
        ...

    def ping(self) -> bytes:
        """A sign of life that changes nothing, for a stream that is silent."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """An error in the middle of the stream, which is cut after it."""
        ...


class Protocol(TypingProtocol):
    """An adapter. It does no I/O and keeps no state."""

    name: WireProtocol

    path: str
    """Route of the endpoint, for example `/v1/chat/completions`."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ModelRequest:
        """Read a request. `headers` are looked up by lower-case names.

        Raises Refusal (400) that names the field, and never refuses a field that it does not know.
        """
        ...

    def reply(self, request: ModelRequest, finished: Sequence[Finished]) -> bytes:
        """The body of a reply that is not streamed: one `Finished` for each of the n choices, in order."""
        ...

    def stream(self, request: ModelRequest) -> ReplyStream:
        """The reply to a request that asks for a stream."""
        ...

    def refuse(self, refusal: Refusal) -> tuple[int, bytes]:
        """HTTP status and body of a refusal, in the protocol's own shape and words."""
        ...
