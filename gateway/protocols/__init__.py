"""Adapters to the protocols that agents speak, one a file."""

from __future__ import annotations

from rollyard.gateway.protocols.chat import ChatProtocol
from rollyard.gateway.protocols.completions import CompletionsProtocol
from rollyard.gateway.protocols.messages import MessagesProtocol
from rollyard.gateway.protocols.protocol import Protocol
from rollyard.gateway.protocols.responses import ResponsesProtocol


def protocols() -> list[Protocol]:
    """Every protocol that the gateway serves."""
    return [ChatProtocol(), ResponsesProtocol(), MessagesProtocol(), CompletionsProtocol()]


def protocol_of(path: str) -> Protocol:
    """The protocol whose endpoint a path is, or under; Chat for all others, so that every error has a shape."""
    for protocol in protocols():
        if protocol.path in path:
            return protocol
    return protocols()[0]
