"""Replies in the JSON of vLLM's chat completions: whole, or as the chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from rollyard.gateway.scripted.policy import ChatRequest, Reply
from rollyard.gateway.tokens.tokenizer import TextTokenizer


class ChatWire:
    """One reply on its way out. `created` is in Unix seconds."""

    def __init__(
        self, request: ChatRequest, reply: Reply, tokenizer: TextTokenizer, *, call_id: str, model: str, created: int
    ) -> None:
        self._request = request
        self._reply = reply
        self._tokenizer = tokenizer
        self._head = {"id": f"chatcmpl-{call_id}", "created": created, "model": model}

    def whole(self) -> bytes:
        """The body of a reply that is not streamed."""
        reply, asked = self._reply, bool(self._request.return_token_ids)
        message = {"role": "assistant", "content": reply.content or None, "refusal": None, "reasoning": None}
        choice = {
            "index": 0,
            "message": {**message, "tool_calls": reply.tool_calls},
            "logprobs": self._logprobs(0, len(reply.ids)),
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
            "token_ids": reply.ids if asked else None,
        }
        return msgspec.json.encode(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [choice],
                "usage": self._usage(),
                "prompt_logprobs": None,
                "prompt_token_ids": reply.prompt_ids.tolist() if asked else None,
                "kv_transfer_params": None,
            }
        )

    def chunks(self, tokens_per_chunk: int) -> Iterator[tuple[int, bytes]]:
        """The events of a stream, each with the number of ids that are out once it is. `[DONE]` is not among them."""
        reply, asked = self._reply, bool(self._request.return_token_ids)
        prompt = {"prompt_token_ids": reply.prompt_ids.tolist()} if asked else {}
        yield 0, self._event([_choice({"role": "assistant", "content": ""}, None)], **prompt)
        for start in range(0, len(reply.ids), tokens_per_chunk):
            end = min(start + tokens_per_chunk, len(reply.ids))
            text = "".join(reply.texts[start:end])
            delta: dict[str, Any] = {"content": text} if text else {}
            last = end == len(reply.ids)
            if last and reply.tool_calls:
                delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(reply.tool_calls)]
            choice = _choice(delta, self._logprobs(start, end))
            if asked:
                choice["token_ids"] = reply.ids[start:end]
            if last:
                choice.update(finish_reason=reply.finish_reason, stop_reason=reply.stop_reason)
            yield end, self._event([choice])
        if not reply.ids:
            yield 0, self._event([{**_choice({}, None), "finish_reason": reply.finish_reason}])
        if (self._request.stream_options or {}).get("include_usage"):
            yield len(reply.ids), self._event([], usage=self._usage())

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices, **more}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self._reply.prompt_ids), len(self._reply.ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        pairs = zip(self._reply.ids[start:end], self._reply.logprobs[start:end], strict=True)
        return {"content": [self._logprob(token, logprob) for token, logprob in pairs]}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token).decode(errors="replace")
        name = f"token_id:{token}" if self._request.return_tokens_as_token_ids else text
        entry = {"token": name, "logprob": logprob, "bytes": list(text.encode())}
        return {**entry, "top_logprobs": [entry] if self._request.top_logprobs else []}


def _choice(delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """The body of a refusal."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})
