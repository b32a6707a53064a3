"""OpenAI Chat Completions, `/v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.protocols import openai
from rollyard.gateway.protocols.body import decode_body
from rollyard.gateway.protocols.chat_messages import read_messages
from rollyard.gateway.protocols.chat_tools import Offer, read_offer, written_calls
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message, WireProtocol

_EXTRAS: Final = ("response_format", "reasoning_effort", "chat_template_kwargs")


class _Body(openai.CompletionFields, frozen=True, kw_only=True):
    messages: list[Message]
    tools: list[Message] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Message] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Any = None
    user: Any = None
    prompt_cache_key: Any = None


class ChatProtocol:
    """See Protocol."""

    name: WireProtocol = "chat"
    path = "/v1/chat/completions"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ModelRequest:
        """See Protocol."""
        parsed = decode_body(body, _Body)
        read_messages(parsed.messages)
        offer = read_offer(
            parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls, parsed.functions, parsed.function_call
        )
        extras = {name: value for name in _EXTRAS if (value := getattr(parsed, name)) is not None}
        return ModelRequest(
            protocol="chat",
            model=parsed.model or "",
            messages=parsed.messages,
            tools=offer.tools,
            params=parsed.params(),
            extras=offer.extras | extras,
            n=parsed.choices(),
            stream=bool(parsed.stream),
            include_usage=parsed.wants_usage(),
            context=_context(parsed, offer),
        )

    def reply(self, request: ModelRequest, finished: Sequence[Finished]) -> bytes:
        """See Protocol."""
        finished = sorted(finished, key=lambda each: each.choice)
        first = finished[0]
        choices = [
            {
                "index": each.choice,
                "message": _message(request, each.reply),
                "finish_reason": _reason(request, each),
                "logprobs": None,
            }
            for each in finished
        ]
        return msgspec.json.encode(
            {
                "id": f"chatcmpl-{first.call_id}",
                "object": "chat.completion",
                "created": first.created,
                "model": request.model,
                "choices": choices,
                "usage": openai.usage(finished),
            }
        )

    def stream(self, request: ModelRequest) -> ChatStream:
        """See Protocol."""
        return ChatStream(request)

    def refuse(self, refusal: Refusal) -> tuple[int, bytes]:
        """See Protocol."""
        return openai.refuse(refusal)


class ChatStream:
    """See ReplyStream. Text goes out at once, tool calls and finish_reason with `Finished`."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._id = ""
        self._begun: set[int] = set()
        self._sent: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._finished: list[Finished] = []

    def events(self, update: Update) -> bytes:
        """See ReplyStream."""
        self._id = self._id or update.call_id
        match update:
            case Waiting():
                return self.ping()
            case Started():
                return self._begin(update)
            case Delta():
                return self._begin(update) + self._piece(update, update.text, update.reasoning)
            case Finished():
                return self._begin(update) + self._end(update)

    def ping(self) -> bytes:
        """See ReplyStream."""
        return openai.PING

    def error(self, refusal: Refusal) -> bytes:
        """See ReplyStream."""
        return openai.event(openai.error(refusal))

    def _begin(self, update: Update) -> bytes:
        if update.choice in self._begun:
            return b""
        self._begun.add(update.choice)
        return self._chunk(update, {"role": "assistant", "content": ""})

    def _piece(self, update: Update, text: str, reasoning: str) -> bytes:
        if not text and not reasoning:
            return b""
        self._sent[update.choice, "content"] += len(text)
        self._sent[update.choice, "reasoning_content"] += len(reasoning)
        delta: dict[str, Any] = {"content": text} if text else {}
        return self._chunk(update, delta | _reasoning(reasoning))

    def _end(self, finished: Finished) -> bytes:
        self._finished.append(finished)
        message = _message(self._request, finished.reply)
        text, reasoning = (
            (message.get(key) or "")[self._sent[finished.choice, key] :] for key in ("content", "reasoning_content")
        )
        parts = [self._piece(finished, text, reasoning)]
        if calls := message.get("tool_calls"):
            deltas = [{"index": index, **call} for index, call in enumerate(calls)]
            parts.append(self._chunk(finished, {"tool_calls": deltas}))
        parts += [
            self._chunk(finished, {key: message[key]}) for key in ("function_call", "refusal") if message.get(key)
        ]
        parts.append(self._chunk(finished, {}, _reason(self._request, finished)))
        if len(self._finished) == self._request.n:
            if self._request.include_usage:
                parts.append(openai.event(self._body(finished, [], usage=openai.usage(self._finished))))
            parts.append(openai.DONE)
        return b"".join(parts)

    def _chunk(self, update: Update, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": update.choice, "delta": delta, "finish_reason": finish_reason}
        return openai.event(self._body(update, [choice]))

    def _body(self, update: Update, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._id}",
            "object": "chat.completion.chunk",
            "created": update.created,
            "model": self._request.model,
            "choices": choices,
            **more,
        }


def _context(parsed: _Body, offer: Offer) -> dict[str, Any]:
    metadata = dict(parsed.metadata) if isinstance(parsed.metadata, dict) else {}
    metadata |= {name: value for name in ("user", "prompt_cache_key") if (value := getattr(parsed, name)) is not None}
    context = {"metadata": metadata, "custom_tools": offer.custom, "functions": offer.legacy}
    return {name: value for name, value in context.items() if value}


def _message(request: ModelRequest, reply: Message) -> Message:
    """A reply in the form that the client speaks."""
    message = {"role": "assistant", "content": None, "refusal": None, **reply}
    message |= _reasoning(message.get("reasoning_content"))
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
    elif request.context.get("functions"):
        # The old form has room for one call; parallel calls were not allowed.
        del message["tool_calls"]
        message["function_call"] = calls[0]["function"]
    else:
        message["tool_calls"] = written_calls(calls, request.context.get("custom_tools", ()))
    return message


def _reasoning(text: str | None) -> dict[str, str]:
    """Under both names that clients look for. Those that know both take one of them."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _reason(request: ModelRequest, finished: Finished) -> str:
    if finished.finish_reason == "tool_calls" and request.context.get("functions"):
        return "function_call"
    return finished.finish_reason
