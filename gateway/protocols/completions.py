"""OpenAI Completions, `/v1/completions`: bare text to continue, without messages and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.protocols import openai
from rollyard.gateway.protocols.body import decode_body
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import WireProtocol
from rollyard.schemas.packed import TokenIds

DEFAULT_MAX_TOKENS: Final = 16
"""As the endpoint has always had it."""


class _Body(openai.CompletionFields, frozen=True, kw_only=True):
    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    metadata: Any = None
    user: Any = None


class CompletionsProtocol:
    """See Protocol. A prompt of token ids is in `context["prompt_ids"]` (TokenIds), and `prompt` is empty then."""

    name: WireProtocol = "completions"
    path = "/v1/completions"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> ModelRequest:
        """See Protocol."""
        parsed = decode_body(body, _Body)
        prompt, ids = _prompt(parsed.prompt)
        _refuse_what_is_not_served(parsed)
        context: dict[str, Any] = {} if ids is None else {"prompt_ids": ids}
        metadata = dict(parsed.metadata) if isinstance(parsed.metadata, dict) else {}
        if metadata:
            context["metadata"] = metadata
        return ModelRequest(
            protocol="completions",
            model=parsed.model or "",
            messages=[],
            prompt=prompt,
            params={"max_tokens": DEFAULT_MAX_TOKENS} | parsed.params(),
            n=parsed.choices(),
            stream=bool(parsed.stream),
            include_usage=parsed.wants_usage(),
            context=context,
        )

    def reply(self, request: ModelRequest, finished: Sequence[Finished]) -> bytes:
        """See Protocol."""
        finished = sorted(finished, key=lambda each: each.choice)
        choices = [_choice(each.choice, each.reply.get("content") or "", _reason(each)) for each in finished]
        first = finished[0]
        return msgspec.json.encode(_body(request, first.call_id, first, choices, usage=openai.usage(finished)))

    def stream(self, request: ModelRequest) -> CompletionStream:
        """See Protocol."""
        return CompletionStream(request)

    def refuse(self, refusal: Refusal) -> tuple[int, bytes]:
        """See Protocol."""
        return openai.refuse(refusal)


class CompletionStream:
    """See ReplyStream."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._id = ""
        self._sent: dict[int, int] = {}
        self._finished: list[Finished] = []

    def events(self, update: Update) -> bytes:
        """See ReplyStream."""
        self._id = self._id or update.call_id
        match update:
            case Waiting() | Started():
                return self.ping()
            case Delta():
                return self._piece(update, update.text) if update.text else b""
            case Finished():
                return self._end(update)

    def ping(self) -> bytes:
        """See ReplyStream."""
        return openai.PING

    def error(self, refusal: Refusal) -> bytes:
        """See ReplyStream."""
        return openai.event(openai.error(refusal))

    def _piece(self, update: Update, text: str, finish_reason: str | None = None) -> bytes:
        self._sent[update.choice] = self._sent.get(update.choice, 0) + len(text)
        choice = _choice(update.choice, text, finish_reason)
        return openai.event(_body(self._request, self._id, update, [choice]))

    def _end(self, finished: Finished) -> bytes:
        self._finished.append(finished)
        rest = (finished.reply.get("content") or "")[self._sent.get(finished.choice, 0) :]
        parts = [self._piece(finished, rest, _reason(finished))]
        if len(self._finished) == self._request.n:
            if self._request.include_usage:
                last = _body(self._request, self._id, finished, [], usage=openai.usage(self._finished))
                parts.append(openai.event(last))
            parts.append(openai.DONE)
        return b"".join(parts)


def _prompt(prompt: str | list[Any]) -> tuple[str, TokenIds | None]:
    """Text, or token ids. Raises Refusal (400)."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt:
        raise Refusal(400, "invalid_request", "`prompt` is empty", param="prompt")
    if isinstance(prompt, str):
        return prompt, None
    if any(isinstance(item, (str, list)) for item in prompt):
        raise Refusal(
            400,
            "unsupported_value",
            f"`prompt` holds {len(prompt)} prompts, the most is one",
            hint="send one request for each",
            param="prompt",
        )
    try:
        if any(isinstance(item, bool) for item in prompt):
            raise TypeError("a boolean is no id")
        return "", TokenIds.of(prompt)
    except (TypeError, OverflowError) as error:
        raise Refusal(
            400, "invalid_request", f"`prompt` is neither text nor token ids: {error}", param="prompt"
        ) from error


def _refuse_what_is_not_served(parsed: _Body) -> None:
    """What changes the text of a reply and cannot be ignored. Raises Refusal (400)."""
    served = {
        "suffix": not parsed.suffix,
        "echo": not parsed.echo,
        "best_of": parsed.best_of is None or parsed.best_of <= (parsed.n or 1),
    }
    for name, fine in served.items():
        if not fine:
            hint = {"echo": "the prompt is known to whoever sent it", "best_of": "ask for n replies, then choose"}
            raise Refusal(
                400, "unsupported_value", f"`{name}` is not supported", hint=hint.get(name, "leave it out"), param=name
            )


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": None}


def _body(request: ModelRequest, number: str, update: Update, choices: list[dict[str, Any]], **more: Any) -> Any:
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": update.created,
        "model": request.model,
        "choices": choices,
        **more,
    }


def _reason(finished: Finished) -> str:
    return "stop" if finished.finish_reason == "tool_calls" else finished.finish_reason
