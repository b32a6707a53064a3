"""Replies in the Responses protocol: output items, the response object, and errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols import openai
from rollyard.gateway.protocols.responses_content import seal
from rollyard.gateway.protocols.responses_ids import item_id, response_id
from rollyard.gateway.protocols.responses_tools import Toolbox, calls_as_items
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message, Usage

_ID_KINDS: Final = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsc",
    "tool_search_call": "tsc",
}
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHO_DEFAULTS: Final[dict[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def echo(body: dict[str, Any]) -> dict[str, Any]:
    """What a response says of the request that it answers."""
    said = {key: default if (value := body.get(key)) is None else value for key, default in _ECHO_DEFAULTS.items()}
    # A reply comes whole in one exchange, whatever was asked.
    return {**said, "background": False}


def response(
    request: ModelRequest,
    call_id: str,
    created: int,
    status: str,
    *,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    error: dict[str, Any] | None = None,
    incomplete: str | None = None,
) -> dict[str, Any]:
    """The response object. `created` is in Unix seconds."""
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created,
        "status": status,
        "model": request.model,
        "error": error,
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "output": output,
        "usage": None if usage is None else _usage(usage),
        **request.context["echo"],
    }


def final_response(request: ModelRequest, finished: Finished, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response object of a reply that has ended."""
    incomplete = _INCOMPLETE.get(finished.finish_reason)
    status = "incomplete" if incomplete else "completed"
    return response(
        request,
        finished.call_id,
        finished.created,
        status,
        output=output,
        usage=finished.usage,
        incomplete=incomplete,
    )


def output_items(request: ModelRequest, finished: Finished, begun: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The items of a reply: reasoning, message, calls; those that a stream has begun (by type) stand first.

    A reply with nothing in it is an empty message, so that the agent's history holds it too.
    """
    reply, call_id = finished.reply, finished.call_id
    reasoning, text = texts(reply)
    calls = calls_as_items(reply.get("tool_calls") or (), toolbox(request))
    wanted = {
        "reasoning": bool(reasoning),
        "message": bool(text or reply.get("refusal") or not (reasoning or calls)),
    }
    order = [*begun, *(kind for kind, is_wanted in wanted.items() if is_wanted and kind not in begun)]
    items: list[dict[str, Any]] = []
    for kind in order:
        number = text_item_id(kind, call_id, len(items))
        if kind == "reasoning":
            items.append(reasoning_item(request, number, reasoning))
        else:
            items.append(message_item(number, text, reply.get("refusal")))
    for call in calls:
        raw = call.pop("raw", False)
        number = item_id(_ID_KINDS[call["type"]], call_id, len(items), raw=raw)
        items.append({"id": number, **call, "status": "completed"})
    if finished.finish_reason in _INCOMPLETE and items:
        items[-1]["status"] = "incomplete"
    return items


def text_item_id(kind: str, call_id: str, index: int) -> str:
    """The id of the reasoning or the message of a reply."""
    return item_id(_ID_KINDS[kind], call_id, index)


def texts(reply: Message) -> tuple[str, str]:
    """Reasoning and text of a reply."""
    content = reply.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return reply.get("reasoning_content") or "", content or ""


def reasoning_item(request: ModelRequest, number: str, text: str | None) -> dict[str, Any]:
    """A reasoning item; without text, as it begins.

    Where summaries are asked for the reasoning is the summary, whole; else it is the content. It is sealed beside that
    if that was asked for: an agent may echo no more than the seal.
    """
    item: dict[str, Any] = {"id": number, "type": "reasoning", "summary": []}
    if not summarised(request):
        item["content"] = []
    if text is None:
        return {**item, "status": "in_progress"}
    if summarised(request):
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if request.context["seal"]:
        item["encrypted_content"] = seal(text)
    return {**item, "status": "completed"}


def message_item(number: str, text: str | None, refusal: str | None = None) -> dict[str, Any]:
    """A message item; without text, as it begins."""
    item: dict[str, Any] = {"id": number, "type": "message", "role": "assistant", "content": []}
    if text is None:
        return {**item, "status": "in_progress"}
    if text or not refusal:
        item["content"].append(text_part(text))
    if refusal:
        item["content"].append({"type": "refusal", "refusal": refusal})
    return {**item, "status": "completed"}


def text_part(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def summarised(request: ModelRequest) -> bool:
    """Whether reasoning goes out as summary."""
    asked: bool = request.context["summary"]
    return asked


def toolbox(request: ModelRequest) -> Toolbox:
    """The tools of a request that this adapter has read."""
    found: Toolbox = request.context["toolbox"]
    return found


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_PARAMS: Final = {"messages": "input", "max_tokens": "max_output_tokens"}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """A refusal before the first byte, in the vendor's codes and with this protocol's names of fields."""
    body = openai.error(refusal)
    body["error"]["param"] = _PARAMS.get(refusal.param or "", refusal.param)
    return body


def stream_error(refusal: Refusal) -> dict[str, Any]:
    """The error of a response that failed in mid-stream.

    Codex gives up at context_length_exceeded and invalid_prompt, and comes again at all others. server_is_overloaded is
    avoided: to some of its versions that is final too.
    """
    message = str(refusal)
    if refusal.code == "context_length_exceeded":
        code = refusal.code
    elif refusal.status == 429:
        code = "rate_limit_exceeded"
        message += f" Please try again in {refusal.retry_after_s or 1}s."  # the only place where a stream can say it
    else:
        code = "server_error" if refusal.status >= 500 else "invalid_prompt"
    return {"code": code, "message": message}
