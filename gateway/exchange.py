"""The gateway's one internal form of a model call: the request, and the updates that its reply arrives in.

OpenAI Chat Completions in plain objects. Protocol adapters translate into and out of it.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from rollyard.schemas.call import Message, Usage, WireProtocol


class ModelRequest(Struct, frozen=True, kw_only=True):
    """What an agent asks for, whatever protocol it speaks."""

    messages: list[Message]
    protocol: WireProtocol = "chat"
    model: Annotated[str, Meta(description="the name that the agent uses; replies echo it")] = ""
    tools: list[Message] | None = None
    params: Annotated[dict[str, Any], Meta(description="sampling parameters; `stop` is a list")] = {}
    extras: Annotated[dict[str, Any], Meta(description="further fields for servers that render chats themselves")] = {}
    stream: bool = False
    include_usage: Annotated[bool, Meta(description="send usage at the end of a stream")] = False


class Started(Struct, frozen=True, tag=True):
    """The intent is in the log and the server has begun: the first byte may go out."""

    call_id: str
    created: Annotated[int, Meta(description="Unix seconds")]


class Delta(Struct, frozen=True, tag=True):
    """A piece of the reply that no agent acts on yet."""

    call_id: str
    created: int
    text: str = ""
    reasoning: str = ""


class Finished(Struct, frozen=True, tag=True):
    """The end of the call is in the log: the rest may go out. `reply` is the whole assistant message."""

    call_id: str
    created: int
    reply: Message
    finish_reason: str
    usage: Usage


Update = Started | Delta | Finished
