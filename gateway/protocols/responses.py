"""OpenAI Responses, `/v1/responses`: what Codex speaks.

The adapter keeps no state. A request that goes on from a response (`previous_response_id`: `resp_` and the call id) or
refers to items of one (`item_reference`) is completed by whoever has the log. In the first case the conversation of the
call, less messages marked `_instructions`, goes between this request's own instructions and its other messages. For the
second see `referenced_calls` and `with_replies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols.body import convert_body, decode_body
from rollyard.gateway.protocols.openai import CompletionFields
from rollyard.gateway.protocols.responses_ids import response_id
from rollyard.gateway.protocols.responses_items import REPLY_OF, messages_of
from rollyard.gateway.protocols.responses_reply import echo, error_body, final_response, output_items
from rollyard.gateway.protocols.responses_stream import ResponsesStream
from rollyard.gateway.protocols.responses_tools import Toolbox, tool_choice
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message, WireProtocol

_METADATA: Final = ("client_metadata", "metadata", "prompt_cache_key", "user", "safety_identifier")
_UNANSWERABLE: Final = {"conversation": "send the conversation as `input`", "prompt": "send its text as `input`"}
_INSTRUCTIONS: Final = "_instructions"


class _Body(CompletionFields, frozen=True, kw_only=True):
    """Responses has fewer sampling fields than the completion endpoints; open-source servers take the rest here too."""

    input: str | list[Any] | None = None
    instructions: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[Any] | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesProtocol:
    """See Protocol.

    `context` of a request: `metadata` (what the agent says of itself in the body, by the body's names),
    `previous_response_id`, `items_left_out` and `tools_left_out` (what no model of ours can take, as it came), and what
    the reply is made with.
    """

    name: WireProtocol = "responses"
    path = "/v1/responses"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ModelRequest:
        """Read a request. Raises Refusal (400) that names the field."""
        parsed, raw = _read(body)
        toolbox = Toolbox()
        toolbox.offer(parsed.tools or (), "tools")
        messages, left_over = _messages(parsed, toolbox)
        choice = tool_choice(parsed.tool_choice, toolbox)
        reasoning = parsed.reasoning or {}
        return ModelRequest(
            protocol="responses",
            model=parsed.model or "",
            messages=messages,
            tools=toolbox.offered or None,
            params=_params(parsed),
            extras=_extras(parsed, toolbox, choice),
            stream=bool(parsed.stream),
            include_usage=True,
            context={
                "metadata": {key: raw[key] for key in _METADATA if raw.get(key) is not None},
                "previous_response_id": parsed.previous_response_id,
                "items_left_out": left_over,
                "tools_left_out": toolbox.left_out,
                "toolbox": toolbox,
                "echo": echo(raw),
                "seal": "reasoning.encrypted_content" in (parsed.include or ()),
                "summary": _wanted(reasoning.get("summary")) or _wanted(reasoning.get("generate_summary")),
            },
        )

    def reply(self, request: ModelRequest, finished: Sequence[Finished]) -> bytes:
        """See Protocol."""
        (only,) = finished
        return msgspec.json.encode(final_response(request, only, output_items(request, only)))

    def stream(self, request: ModelRequest) -> ResponsesStream:
        """See Protocol."""
        return ResponsesStream(request)

    def refuse(self, refusal: Refusal) -> tuple[int, bytes]:
        """See Protocol."""
        return refusal.status, msgspec.json.encode(error_body(refusal))


def referenced_calls(request: ModelRequest) -> list[str]:
    """The calls whose replies a request refers to without repeating them, by id."""
    return [message[REPLY_OF] for message in request.messages if REPLY_OF in message]


def with_replies(request: ModelRequest, replies: Mapping[str, Message]) -> ModelRequest:
    """The request with the replies of its `referenced_calls` put in. Raises Refusal (400) where one is missing."""
    messages = []
    for message in request.messages:
        call_id = message.get(REPLY_OF)
        if call_id is not None and call_id not in replies:
            what = f"`input` refers to items of {response_id(call_id)}, which this session does not have"
            raise Refusal(400, "invalid_request", what, hint="send the items themselves", param="input")
        messages.append(message if call_id is None else replies[call_id])
    return structs.replace(request, messages=messages)


def _read(body: bytes) -> tuple[_Body, dict[str, Any]]:
    """The body, and the same as it came: replies echo it."""
    raw = decode_body(body, dict[str, Any])
    for name, hint in _UNANSWERABLE.items():
        if raw.get(name) is not None:
            raise Refusal(400, "unsupported_value", f"`{name}` is not supported", hint=hint, param=name)
    return convert_body(raw, _Body), raw


def _messages(parsed: _Body, toolbox: Toolbox) -> tuple[list[Message], list[Any]]:
    messages: list[Message] = []
    if isinstance(parsed.instructions, str):
        messages = [{"role": "system", "content": parsed.instructions}] if parsed.instructions else []
    elif parsed.instructions:
        messages, _ = messages_of(parsed.instructions, toolbox, "instructions")
    messages = [{**message, _INSTRUCTIONS: True} for message in messages]
    left_over: list[Any] = []
    if isinstance(parsed.input, str):
        messages.append({"role": "user", "content": parsed.input})
    elif parsed.input:
        said, left_over = messages_of(parsed.input, toolbox)
        messages += said
    if not messages and parsed.previous_response_id is None:
        raise Refusal(400, "invalid_request", "`input` is empty", param="input")
    return messages, left_over


def _params(parsed: _Body) -> dict[str, Any]:
    limit = parsed.max_output_tokens
    if limit is None:
        return parsed.params()
    if limit < 1:
        message = f"max_output_tokens is {limit}, it must be at least 1"
        raise Refusal(400, "invalid_request", message, param="max_output_tokens")
    return {**parsed.params(), "max_tokens": limit}


def _extras(parsed: _Body, toolbox: Toolbox, choice: Any) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    # Servers refuse these two where there are no tools.
    if toolbox.offered:
        if choice is not None:
            extras["tool_choice"] = choice
        if parsed.parallel_tool_calls is not None:
            extras["parallel_tool_calls"] = parsed.parallel_tool_calls
    form = _response_format((parsed.text or {}).get("format"))
    if form is not None:
        extras["response_format"] = form
    if (effort := (parsed.reasoning or {}).get("effort")) is not None:
        extras["reasoning_effort"] = effort
    if parsed.chat_template_kwargs:
        extras["chat_template_kwargs"] = parsed.chat_template_kwargs
    return extras


def _response_format(form: Any) -> dict[str, Any] | None:
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form["type"] != "json_schema" or "json_schema" in form:
        return form  # json_object, or Chat's own form
    said = {key: value for key, value in form.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": said}


def _wanted(summary: Any) -> bool:
    return summary not in (None, "none")
