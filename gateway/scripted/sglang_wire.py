"""Replies in the JSON of SGLang: /generate, and chat completions with ids in `sglext`. Pure.

From the source of SGLang 0.5.23; not compared with a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rollyard.gateway.scripted.asked import ChatRequest, GenerateRequest
from rollyard.gateway.scripted.policy import Reply
from rollyard.gateway.scripted.wire import chat_logprobs, event, portions, usage
from rollyard.gateway.tokens.tokenizer import TextTokenizer

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class GenerateWire:
    """See Wire. Each event holds the whole reply so far; `version` gives the weights that are served at the moment."""

    def __init__(self, request: GenerateRequest, reply: Reply, *, rid: str, version: Callable[[], str]) -> None:
        self._request = request
        self._reply = reply
        self._rid = rid
        self._version = version

    def whole(self) -> bytes:
        """See Wire."""
        return msgspec.json.encode(self._upto(len(self._reply.ids), self._finish()))

    def chunks(self, tokens_per_chunk: int) -> Iterator[tuple[int, bytes]]:
        """See Wire."""
        for _, end in portions(len(self._reply.ids), tokens_per_chunk):
            last = end == len(self._reply.ids)
            yield end, event(self._upto(end, self._finish() if last else None))

    def aborted(self, sent: int) -> bytes:
        """See Wire."""
        return event(self._upto(sent, ABORTED))

    def _upto(self, end: int, finish_reason: dict[str, Any] | None) -> dict[str, Any]:
        reply = self._reply
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": finish_reason,
            "prompt_tokens": len(reply.prompt_ids),
            "weight_version": self._version(),
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
        }
        if self._request.return_logprob:
            triples = [(logprob, token, None) for logprob, token in zip(reply.logprobs, reply.ids, strict=True)]
            meta |= {
                "input_token_logprobs": [],
                "output_token_logprobs": triples[:end],
                "output_token_logprobs_length": end,
            }
        answer = {"text": reply.joined(0, end).raw, "output_ids": reply.ids[:end], "meta_info": meta}
        if self._request.return_prompt_token_ids:
            answer["prompt_token_ids"] = reply.prompt_ids.tolist()
        return answer

    def _finish(self) -> dict[str, Any]:
        reply = self._reply
        if reply.finish_reason == "length":
            return {"type": "length", "length": len(reply.ids)}
        if reply.finish_reason == "abort":
            return ABORTED
        return {"type": "stop", "matched": reply.stop_reason if reply.stop_reason is not None else reply.ids[-1]}


class SglangChatWire:
    """See Wire. A chat completion; `input_ids` and `output_ids` say what its headers asked for."""

    def __init__(
        self,
        request: ChatRequest,
        reply: Reply,
        tokenizer: TextTokenizer,
        *,
        rid: str,
        created: int,
        version: Callable[[], str],
        input_ids: bool,
        output_ids: bool,
    ) -> None:
        self._request = request
        self._reply = reply
        self._tokenizer = tokenizer
        self._version = version
        self._ids = (input_ids, output_ids)
        self._head = {"id": rid, "created": created, "model": request.model}

    def whole(self) -> bytes:
        """See Wire."""
        reply = self._reply
        said = reply.joined()
        message = {
            "role": "assistant",
            "content": said.content or None,
            "reasoning_content": said.reasoning or None,
            "tool_calls": reply.tool_calls or None,
        }
        logprobs = self._logprobs(0, len(reply.ids))
        finish = {"finish_reason": reply.finish_reason, "matched_stop": self._matched()}
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "logprobs": logprobs, **finish}],
            "usage": usage(reply),
            "metadata": {"weight_version": self._version()},
        }
        return msgspec.json.encode(body | self._extension(len(reply.ids)))

    def chunks(self, tokens_per_chunk: int) -> Iterator[tuple[int, bytes]]:
        """See Wire."""
        reply = self._reply
        yield 0, self._delta({"role": "assistant", "content": ""})
        for start, end in portions(len(reply.ids), tokens_per_chunk):
            said = reply.joined(start, end)
            delta: dict[str, Any] = {"content": said.content} if said.content else {}
            if said.reasoning:
                delta["reasoning_content"] = said.reasoning
            if end == len(reply.ids) and reply.tool_calls:
                delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(reply.tool_calls)]
            yield end, self._delta(delta, logprobs=self._logprobs(start, end))
        yield len(reply.ids), self._end(len(reply.ids), reply.finish_reason, self._matched())

    def aborted(self, sent: int) -> bytes:
        """See Wire."""
        return self._end(sent, "abort", None)

    def _end(self, sent: int, finish_reason: str, matched: int | str | None) -> bytes:
        """The reason, then the ids, then the usage, each in an event of its own."""
        events = self._delta({}, finish_reason=finish_reason, matched_stop=matched)
        extension = self._extension(sent)
        if extension:
            events += self._event([], **extension)
        if self._request.stream_options and self._request.stream_options.include_usage:
            reply = self._reply if sent == len(self._reply.ids) else self._reply.cut(sent)
            events += self._event([], usage=usage(reply))
        return events

    def _extension(self, sent: int) -> dict[str, Any]:
        input_ids, output_ids = self._ids
        told: dict[str, Any] = {"input_ids": self._reply.prompt_ids.tolist()} if input_ids else {}
        if output_ids:
            told["output_ids"] = [self._reply.ids[:sent]]
        return {"sglext": told} if told else {}

    def _matched(self) -> int | str | None:
        reply = self._reply
        if reply.finish_reason not in ("stop", "tool_calls"):
            return None
        return reply.stop_reason if reply.stop_reason is not None else reply.ids[-1]

    def _delta(self, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None, **more}
        return self._event([choice])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "object": "chat.completion.chunk", "choices": choices, **more})

    def _logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if not self._request.logprobs or start == end:
            return None
        return chat_logprobs(self._reply, self._tokenizer, start, end)
