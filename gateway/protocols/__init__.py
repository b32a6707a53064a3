"""Adapters to the protocols that agents speak, one a file."""

from __future__ import annotations

from rollyard.gateway.protocols.chat import ChatProtocol
from rollyard.gateway.protocols.protocol import Protocol


def protocols() -> list[Protocol]:
    """Every protocol that the gateway serves."""
    return [ChatProtocol()]
