"""Replies in the JSON of vLLM: whole, or as the events of a stream. Pure.

Which keys are there, and when, is as in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, Protocol

import msgspec

from rollyard.gateway.scripted.asked import ChatRequest, CompletionRequest
from rollyard.gateway.scripted.policy import Reply
from rollyard.gateway.tokens.tokenizer import TextTokenizer

_FINGERPRINT: Final = "vllm-0.32.0-scripted"
_NO_DETAILS: Final = {"prompt_tokens_details": None, "completion_tokens_details": None}
_NOTHING_MORE: Final = {
    "service_tier": None,
    "system_fingerprint": _FINGERPRINT,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}


class Wire(Protocol):
    """One reply on its way out."""

    def whole(self) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def chunks(self, tokens_per_chunk: int) -> Iterator[tuple[int, bytes]]:
        """The events of a stream, each with the number of ids that are out once it is. `[DONE]` is not among them."""
        ...

    def aborted(self, sent: int) -> bytes:
        """The events that end a stream after so many ids, without `[DONE]`."""
        ...


class _VllmWire:
    """What the events of both kinds have in common. `_head` stands in each."""

    _head: dict[str, Any]
    _request: ChatRequest | CompletionRequest

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "choices": choices, **more})

    def _usage_event(self, reply: Reply) -> bytes:
        return self._event([], usage=usage(reply), system_fingerprint=_FINGERPRINT)

    def _fingerprint(self, *, last: bool) -> dict[str, str]:
        """In the very last event, which is that of usage where it is wanted."""
        return {"system_fingerprint": _FINGERPRINT} if last and not self._wants_usage() else {}

    def _wants_usage(self) -> bool:
        return bool(self._request.stream_options and self._request.stream_options.include_usage)


class ChatWire(_VllmWire):
    """See Wire. A chat completion; `created` is in Unix seconds."""

    _request: ChatRequest

    def __init__(
        self, request: ChatRequest, reply: Reply, tokenizer: TextTokenizer, *, call_id: str, model: str, created: int
    ) -> None:
        self._request = request
        self._reply = reply
        self._tokenizer = tokenizer
        self._head = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }

    def whole(self) -> bytes:
        """See Wire."""
        reply, asked = self._reply, bool(self._request.return_token_ids)
        said = reply.joined()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": said.reasoning or None,
        }
        if reply.tool_calls:
            message["tool_calls"] = reply.tool_calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(0, len(reply.ids)),
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
            "token_ids": reply.ids if asked else None,
            "routed_experts": None,
        }
        return msgspec.json.encode(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [choice],
                "usage": usage(reply) | _NO_DETAILS,
                "prompt_logprobs": None,
                "prompt_token_ids": reply.prompt_ids.tolist() if asked else None,
                "prompt_text": None,
                **_NOTHING_MORE,
            }
        )

    def chunks(self, tokens_per_chunk: int) -> Iterator[tuple[int, bytes]]:
        """See Wire."""
        reply = self._reply
        prompt_ids = reply.prompt_ids.tolist() if self._request.return_token_ids else None
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield 0, self._event([first], prompt_token_ids=prompt_ids, prompt_text=None)
        spans = list(portions(len(reply.ids), tokens_per_chunk))
        calls = _call_deltas(reply.tool_calls)
        for left, (start, end) in zip(reversed(range(len(spans))), spans, strict=True):
            said = reply.joined(start, end)
            delta: dict[str, Any] = {"reasoning": said.reasoning} if said.reasoning else {}
            if said.content:
                delta["content"] = said.content
            last = not left
            # In pieces, before the one that ends the reply.
            due = [calls.pop(0) for _ in range(max(0, len(calls) - max(0, left - 1)))]
            if due:
                delta = {"content": None, **delta, "tool_calls": due}
            choice = self._choice(delta, start, end, reply.finish_reason if last else None)
            yield end, self._event([choice], **self._fingerprint(last=last))
        if self._wants_usage():
            yield len(reply.ids), self._usage_event(reply)

    def aborted(self, sent: int) -> bytes:
        """See Wire."""
        ended = self._event([self._choice({}, sent, sent, "abort")], **self._fingerprint(last=True))
        return ended + (self._usage_event(self._reply.cut(sent)) if self._wants_usage() else b"")

    def _choice(self, delta: dict[str, Any], start: int, end: int, finish_reason: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(start, end),
            "finish_reason": finish_reason,
            "token_ids": self._reply.ids[start:end] if self._request.return_token_ids else None,
        }
        if finish_reason is not None:
            choice["stop_reason"] = self._reply.stop_reason
        return choice

    def _logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(
            self._reply,
            self._tokenizer,
            start,
            end,
            as_ids=bool(self._request.return_tokens_as_token_ids),
            top=bool(self._request.top_logprobs),
        )


class CompletionWire(_VllmWire):
    """See Wire. A completion; `created` is in Unix seconds."""

    _request: CompletionRequest

    def __init__(
        self,
        request: CompletionRequest,
        reply: Reply,
        tokenizer: TextTokenizer,
        *,
        call_id: str,
        model: str,
        created: int,
    ) -> None:
        self._request = request
        self._reply = reply
        self._tokenizer = tokenizer
        self._head = {"id": f"cmpl-{call_id}", "object": "text_completion", "created": created, "model": model}

    def whole(self) -> bytes:
        """See Wire."""
        reply = self._reply
        choice = self._choice(0, len(reply.ids), _finish(reply))
        choice |= {"prompt_logprobs": None, "routed_experts": None}
        return msgspec.json.encode(
            {**self._head, "choices": [choice], "usage": usage(reply) | _NO_DETAILS, **_NOTHING_MORE}
        )

    def chunks(self, tokens_per_chunk: int) -> Iterator[tuple[int, bytes]]:
        """See Wire."""
        reply = self._reply
        for start, end in portions(len(reply.ids), tokens_per_chunk):
            last = end == len(reply.ids)
            choice = self._choice(start, end, _finish(reply) if last else None)
            yield end, self._event([choice], **self._fingerprint(last=last))
        if self._wants_usage():
            yield len(reply.ids), self._usage_event(reply)

    def aborted(self, sent: int) -> bytes:
        """See Wire."""
        ended = self._event([self._choice(sent, sent, "abort")], **self._fingerprint(last=True))
        return ended + (self._usage_event(self._reply.cut(sent)) if self._wants_usage() else b"")

    def _choice(self, start: int, end: int, finish_reason: str | None) -> dict[str, Any]:
        reply, asked = self._reply, bool(self._request.return_token_ids)
        return {
            "index": 0,
            "text": reply.joined(start, end).raw,
            "logprobs": self._logprobs(start, end),
            "finish_reason": finish_reason,
            "stop_reason": reply.stop_reason if finish_reason is not None else None,
            "prompt_token_ids": reply.prompt_ids.tolist() if asked and start == 0 else None,
            "token_ids": reply.ids[start:end] if asked else None,
        }

    def _logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        names, logprobs = self._names(start, end), self._reply.logprobs[start:end]
        # Offsets are in the names of the tokens, not in the text.
        lengths = [0, *map(len, self._names(0, end))]
        return {
            "text_offset": list(accumulate(lengths))[start:end],
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)],
        }

    def _names(self, start: int, end: int) -> list[str]:
        ids = self._reply.ids[start:end]
        if self._request.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in ids]
        return [token_text(self._tokenizer, token) for token in ids]


def portions(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each chunk of a stream; one empty chunk where nothing was sampled."""
    yield from ((start, min(start + size, count)) for start in range(0, max(count, 1), size))


def usage(reply: Reply) -> dict[str, Any]:
    """`usage` of a reply."""
    prompt, completion = len(reply.prompt_ids), len(reply.ids)
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def chat_logprobs(
    reply: Reply, tokenizer: TextTokenizer, start: int, end: int, *, as_ids: bool = False, top: bool = False
) -> dict[str, Any]:
    """`logprobs` of a choice of a chat completion. `as_ids`: tokens are named by id."""
    content = []
    for token, logprob in zip(reply.ids[start:end], reply.logprobs[start:end], strict=True):
        text = token_text(tokenizer, token)
        entry = {"token": f"token_id:{token}" if as_ids else text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**entry, "top_logprobs": [entry] if top else []})
    return {"content": content}


def token_text(tokenizer: TextTokenizer, token: int) -> str:
    """A token by itself, as text."""
    return tokenizer.token_bytes(token).decode(errors="replace")


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """The body of a refusal."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def _call_deltas(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls as they are streamed: the name of each, then its arguments."""
    deltas = []
    for index, call in enumerate(calls):
        function = call["function"]
        deltas.append({**call, "index": index, "function": {"name": function["name"]}})
        deltas.append({"index": index, "function": {"arguments": function["arguments"]}})
    return deltas


def _finish(reply: Reply) -> str:
    return "stop" if reply.finish_reason == "tool_calls" else reply.finish_reason
