"""The gateway's one internal form of a model call: the request, and the updates that its reply arrives in.

OpenAI Chat Completions in plain objects. Protocol adapters translate into and out of it. What a protocol has beyond
that form is kept in keys that start with `_` (see Message below) or in `ModelRequest.context`, so that nothing is lost.

A message is a dict with `role` (system, developer, user, assistant, tool), `content` (a string, null, or a list of
parts: text, image_url, ...), and where they apply `name`, `tool_calls`, `tool_call_id`, `reasoning_content`, `refusal`.
Tools are OpenAI's function tools, whatever they were in the agent's protocol.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from rollyard.schemas.call import AgentIds, Message, Usage, WireProtocol
from rollyard.schemas.names import Scenario

TEMPLATE_OPTIONS: Final = "chat_template_kwargs"


class ModelRequest(Struct, frozen=True, kw_only=True):
    """What an agent asks for, whatever protocol it speaks."""

    messages: list[Message]
    protocol: WireProtocol = "chat"
    model: Annotated[str, Meta(description="the name that the agent uses; replies echo it")] = ""
    tools: list[Message] | None = None
    params: Annotated[dict[str, Any], Meta(description="sampling parameters; `stop` is a list")] = {}
    extras: Annotated[
        dict[str, Any],
        Meta(
            description="tool_choice, parallel_tool_calls, response_format, reasoning_effort, chat_template_kwargs, "
            "in OpenAI Chat's own form"
        ),
    ] = {}
    n: Annotated[int, Meta(ge=1, description="replies wanted; each is a call of its own")] = 1
    stream: bool = False
    include_usage: Annotated[bool, Meta(description="send usage at the end of a stream")] = False
    ids: Annotated[AgentIds, Meta(description="what the agent says of itself")] = AgentIds()
    scenario: Annotated[Scenario, Meta(description="what the call is for")] = "main"
    prompt: Annotated[str | None, Meta(description="bare text to continue (/v1/completions)")] = None
    body_bytes: Annotated[int, Meta(description="size of the request's body")] = 0
    context: Annotated[dict[str, Any], Meta(description="what the adapter needs again to phrase the reply")] = {}

    @property
    def template_options(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return self.extras.get(TEMPLATE_OPTIONS) or {}


def same_request(one: ModelRequest, other: ModelRequest) -> bool:
    """Whether a request is a repetition of another one, streamed or not."""
    return (
        len(one.messages) == len(other.messages)
        and (one.ids.thread, one.ids.sub_agent) == (other.ids.thread, other.ids.sub_agent)
        and one.context.get("prompt_ids") == other.context.get("prompt_ids")
        and (one.prompt, one.tools, one.params, one.extras) == (other.prompt, other.tools, other.params, other.extras)
        and one.messages == other.messages
    )


class Waiting(Struct, frozen=True, tag=True):
    """The intent is in the log, and the server has been silent for a while: a sign of life may go out."""

    call_id: str
    created: Annotated[int, Meta(description="Unix seconds")]
    choice: int = 0


class Started(Struct, frozen=True, tag=True):
    """The intent is in the log and the server has begun: the first byte may go out.

    `usage` counts the prompt, where it is known by now.
    """

    call_id: str
    created: int
    choice: Annotated[int, Meta(description="which of the n replies, from 0")] = 0
    usage: Usage = Usage()


class Delta(Struct, frozen=True, tag=True):
    """A piece of the reply that no agent acts on yet."""

    call_id: str
    created: int
    text: str = ""
    reasoning: str = ""
    choice: int = 0


class Finished(Struct, frozen=True, tag=True):
    """The end of the call is in the log: the rest may go out. `reply` is the whole assistant message.

    Texts and reasoning of all deltas before it, joined, are `content` and `reasoning_content` of the reply, or a prefix
    of them. `finish_reason`: stop, length, tool_calls or content_filter; `stop_string` is what ended it.
    """

    call_id: str
    created: int
    reply: Message
    finish_reason: str
    usage: Usage
    stop_string: str | None = None
    choice: int = 0


Update = Waiting | Started | Delta | Finished
