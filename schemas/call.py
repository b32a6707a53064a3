"""One model call in the log: its intent, logged before dispatch, and its end.

Contract: docs/architecture.md sections 5.3 and 6. Records are deltas: a call names its parent and holds only what the
parent's record does not. Parent ids mean the parent's prompt ids followed by its sampled ids.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from rollyard.schemas.names import Attempt, RolloutId, RunName, Scenario, SchemaVersion, Seconds, Tokens
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.task import SCHEMA_VERSION

Message = dict[str, Any]
WireProtocol = Literal["chat", "responses", "messages", "completions", "synthetic"]
CallStatus = Literal["ok", "error", "aborted", "superseded"]


class AgentIds(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent says of itself in headers and metadata. Never believed for access, only kept and compared."""

    client: Annotated[str, Meta(description="program and version, from the user agent")] = ""
    session: Annotated[str, Meta(description="the agent's own session or conversation")] = ""
    thread: Annotated[str, Meta(description="thread within that; a sub-agent has another one")] = ""
    parent_thread: Annotated[str, Meta(description="thread that started this one")] = ""
    sub_agent: Annotated[str, Meta(description="id or kind of a sub-agent; empty: the main agent")] = ""
    window: Annotated[str, Meta(description="context window, counted by compactions")] = ""
    kind: Annotated[str, Meta(description="kind of request, in the agent's own words")] = ""


class CallIntent(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="intent", tag_field="type"):
    """A call is about to be dispatched. Whoever wrote this owes one `CallEnd`."""

    call_id: Annotated[str, Meta(description="unique; sent to the model server as x-request-id")]
    run: RunName
    rollout_id: RolloutId
    attempt: Attempt
    gateway: Annotated[str, Meta(description="incarnation of the gateway process, a key of the `gateways` bucket")]
    at_ms: Annotated[int, Meta(description="when the request came, Unix ms")]
    latest_end_ms: Annotated[int, Meta(description="after this time the call counts as lost, Unix ms")]
    protocol: Annotated[WireProtocol, Meta(description="API that the agent spoke")] = "chat"
    scenario: Annotated[Scenario, Meta(description="what the call is for")] = "main"
    agent: Annotated[AgentIds, Meta(description="what the agent says of itself")] = AgentIds()
    model: Annotated[str, Meta(description="served model")] = ""
    asked_model: Annotated[str, Meta(description="model name that the agent used")] = ""
    stream: Annotated[bool, Meta(description="whether the agent asked for a stream")] = False
    parent: Annotated[str | None, Meta(description="call whose reply this request continues")] = None
    shared_messages: Annotated[
        int, Meta(description="leading messages equal to the parent's messages plus its reply")
    ] = 0
    messages: Annotated[list[Message], Meta(description="the messages after those, OpenAI Chat form")] = []
    tools: Annotated[list[Message] | None, Meta(description="tool definitions; null: the parent's")] = None
    template: Annotated[dict[str, Any], Meta(description="options of the chat template, with `tools`")] = {}
    prompt: Annotated[str | None, Meta(description="bare text to continue, in place of messages")] = None
    contents: Annotated[
        dict[str, str],
        Meta(description="parts that are kept once by content: `tools` or index in `messages`, to blob name"),
    ] = {}
    lenience: Annotated[
        tuple[str, ...], Meta(description="rules without which the agent's echo of the parent's reply would differ")
    ] = ()
    supersedes: Annotated[str | None, Meta(description="dead call that this one repeats")] = None
    extras: Annotated[dict[str, Any], Meta(description="tool_choice, response_format and the like, as asked")] = {}
    params: Annotated[dict[str, Any], Meta(description="sampling parameters as sent to the server")] = {}
    request_bytes: Annotated[int, Meta(description="size of the agent's request body")] = 0
    drift: Annotated[str | None, Meta(description="why the parent's ids were not continued; null: they were")] = None
    schema_version: SchemaVersion = SCHEMA_VERSION


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts as reported to the agent."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    reasoning_tokens: Annotated[Tokens, Meta(description="of the completion; 0 also where nobody counts them")] = 0


class CallTimings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Durations of a call in seconds; null where it did not get that far."""

    queue_s: Annotated[Seconds | None, Meta(description="until the request went to the model server")] = None
    first_token_s: Seconds | None = None
    total_s: Seconds | None = None


class VersionSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampled ids [start, end) that came from weights of one policy version."""

    start: Annotated[int, Meta(ge=0, description="first of completion_ids")] = 0
    end: Annotated[int, Meta(ge=0, description="one past the last")]
    policy_version: Annotated[int | None, Meta(description="null: not known")] = None


class CallEnd(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="end", tag_field="type"):
    """How a call ended. If two ends of a call exist, the one with the lower sequence counts."""

    call_id: Annotated[str, Meta(description="of the intent")]
    run: RunName
    rollout_id: RolloutId
    attempt: Attempt
    at_ms: Annotated[int, Meta(description="when the reply was complete or given up, Unix ms")]
    status: Annotated[CallStatus, Meta(description="ok: the agent has the whole reply")]
    shared_prompt_ids: Annotated[int, Meta(description="leading prompt ids equal to the parent's ids")] = 0
    prompt_ids: Annotated[TokenIds, Meta(description="the prompt ids after those")] = field(default_factory=TokenIds)
    completion_ids: Annotated[TokenIds, Meta(description="sampled ids, shape [n]")] = field(default_factory=TokenIds)
    logprobs: Annotated[Logprobs, Meta(description="of completion_ids, shape [n], or empty")] = field(
        default_factory=Logprobs
    )
    logprob_kind: Annotated[str, Meta(description="raw, processed or unknown")] = "unknown"
    reply: Annotated[Message | None, Meta(description="the assistant message as sent, OpenAI Chat form")] = None
    finish_reason: Annotated[str | None, Meta(description="stop, length or tool_calls; null: no whole reply")] = None
    usage: Annotated[Usage, Meta(description="token counts as reported to the agent")] = Usage()
    untrainable: Annotated[str | None, Meta(description="why the ids cannot be trained on; null: they can")] = None
    error: Annotated[str | None, Meta(description="what went wrong, for status other than ok")] = None
    http_status: Annotated[int, Meta(description="status sent to the agent")] = 200
    server: Annotated[str, Meta(description="id of the model server")] = ""
    engine: Annotated[str, Meta(description="kind and version of the engine")] = ""
    policy_version: Annotated[int | None, Meta(description="weights at dispatch; null: not known")] = None
    policy_version_end: Annotated[int | None, Meta(description="weights at the end, where they differ")] = None
    version_spans: Annotated[
        tuple[VersionSpan, ...], Meta(description="of completion_ids, where the weights changed in mid-reply")
    ] = ()
    stop_string: Annotated[str | None, Meta(description="stop string that ended the reply")] = None
    timings: Annotated[CallTimings, Meta(description="durations")] = CallTimings()
    schema_version: SchemaVersion = SCHEMA_VERSION


CallEvent = CallIntent | CallEnd


class CallRecord(Struct, frozen=True, kw_only=True):
    """A call as the stitcher sees it: intent and end joined, deltas resolved."""

    intent: Annotated[CallIntent, Meta(description="as logged")]
    end: Annotated[CallEnd | None, Meta(description="as logged; null: none came")]
    intent_seq: Annotated[int, Meta(description="LOG sequence of the intent")]
    end_seq: Annotated[int, Meta(description="LOG sequence of the end; 0: none")]
    messages: Annotated[list[Message], Meta(description="the whole request")]
    tools: Annotated[list[Message] | None, Meta(description="tool definitions of the request")]
    prompt_ids: TokenIds
    broken: Annotated[
        str | None,
        Meta(
            description="why intent or deltas could not be resolved; null: they could. intent_seq is 0 without intent"
        ),
    ] = None
