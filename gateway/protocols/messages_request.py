"""The body of a Messages request as a ModelRequest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.protocols.body import convert_body, decode_body
from rollyard.gateway.protocols.messages_blocks import chat_messages, text_or_parts
from rollyard.gateway.protocols.messages_fields import Block, bad, blocks, need, objects
from rollyard.schemas.call import Message

BILLING: Final = "x-anthropic-billing-header:"
_EFFORTS: Final = {"xhigh": "high", "max": "high"}


class _ToolChoice(Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Struct, frozen=True):
    type: str


class _OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class _Body(Struct, frozen=True):
    messages: list[Any]
    model: str = ""
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    # The following stand in the context too, as they came.
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


_IN_CONTEXT: Final = (
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "metadata",
    "context_management",
    "service_tier",
    "betas",
    "mcp_servers",
    "container",
)
_KNOWN: Final = frozenset((*_Body.__struct_fields__, *_IN_CONTEXT))
_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k")


def parse_request(body: bytes) -> ModelRequest:
    """Read a request body. Raises Refusal (400) that names the field.

    `context` holds the fields of the body that have no place of their own in a ModelRequest, as they came; `more` are
    those that nobody here knows, `billing` lines of the system prompt that are not for the model, `server_tools` the
    tools that only the vendor's own servers could run.
    """
    raw = decode_body(body, dict[str, Any])
    parsed = convert_body(raw, _Body)
    if not parsed.messages:
        raise bad("messages", "it is empty")
    if parsed.max_tokens is not None and parsed.max_tokens < 1:
        raise bad("max_tokens", f"it is {parsed.max_tokens}, it must be at least 1")
    context = {key: raw[key] for key in _IN_CONTEXT if raw.get(key) is not None}
    if more := {key: value for key, value in raw.items() if key not in _KNOWN and value is not None}:
        context["more"] = more
    messages = _system(parsed.system, context)
    for index, message in enumerate(objects(parsed.messages, "messages")):
        messages += chat_messages(message, f"messages[{index}]")
    tools, server_tools = _tools(parsed.tools or [])
    if server_tools:
        context["server_tools"] = server_tools
    params = {name: value for name in _SAMPLING if (value := getattr(parsed, name)) is not None}
    if parsed.stop_sequences:
        params["stop"] = parsed.stop_sequences
    return ModelRequest(
        protocol="messages",
        model=parsed.model,
        messages=messages,
        tools=tools or None,
        params=params,
        extras=_extras(parsed, tools),
        stream=bool(parsed.stream),
        context=context,
    )


def _system(system: str | list[Any] | None, context: dict[str, Any]) -> list[Message]:
    """The system prompt as a message, or none.

    Claude Code puts a line for the vendor's accounts in front. It changes between conversations that are otherwise
    the same, so it would part their prompts: it goes into the context.
    """
    billing = []
    content: str | list[Block]
    if isinstance(system, list):
        bare = blocks(system, "system")
        billing = [block["text"] for block in bare if str(block.get("text", "")).startswith(BILLING)]
        content = text_or_parts([b for b in bare if not str(b.get("text", "")).startswith(BILLING)], "system")
    else:
        content = system or ""
        if content.startswith(BILLING):
            line, _, content = content.partition("\n")
            billing = [line]
    if billing:
        context["billing"] = billing
    return [{"role": "system", "content": content}] if content else []


def _tools(tools: list[Any]) -> tuple[list[Message], list[Block]]:
    """Tools that a model can be offered, as functions; and those that run on the vendor's own servers."""
    functions: list[Message] = []
    others: list[Block] = []
    for index, tool in enumerate(objects(tools, "tools")):
        field = f"tools[{index}]"
        if tool.get("type") not in (None, "custom") and "input_schema" not in tool:
            others.append(tool)
            continue
        function: Block = {"name": need(tool, "name", str, field)}
        if tool.get("description") is not None:
            function["description"] = need(tool, "description", str, field)
        function["parameters"] = need(tool, "input_schema", dict, field)
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        functions.append({"type": "function", "function": function})
    return functions, others


def _extras(body: _Body, tools: list[Message]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if body.tool_choice is not None:
        extras |= _tool_choice(body.tool_choice, {tool["function"]["name"] for tool in tools})
    if body.thinking is not None:
        extras["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    config = body.output_config or _OutputConfig()
    if config.effort is not None:
        extras["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    form = config.format or body.output_format
    if form is not None and form.get("type") == "json_schema":
        field = "output_config.format" if config.format else "output_format"
        schema = {"name": "reply", "schema": need(form, "schema", dict, field), "strict": True}
        extras["response_format"] = {"type": "json_schema", "json_schema": schema}
    return extras


def _tool_choice(choice: _ToolChoice, offered: set[str]) -> Mapping[str, Any]:
    extras: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        extras["parallel_tool_calls"] = False
    match choice.type:
        case "auto" | "none":
            extras["tool_choice"] = choice.type
        case "any":
            extras["tool_choice"] = "required"
        case "tool":
            if not choice.name:
                raise bad("tool_choice.name", "it is missing")
            extras["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case other:
            raise bad("tool_choice.type", f"{other!r} is unknown; it must be auto, any, tool or none")
    # A tool of the vendor's cannot be chosen here; servers refuse a choice among no tools.
    return extras if offered and (choice.type != "tool" or choice.name in offered) else {}
