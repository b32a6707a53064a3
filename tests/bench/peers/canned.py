"""What is asked and what is answered: request bodies of a given size, and the replies of a vLLM to them. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

SIZES: Final = {"8 KB": 8 * 1024, "64 KB": 64 * 1024, "512 KB": 512 * 1024}
REPLY_TOKENS: Final = 200
EVENTS: Final = REPLY_TOKENS + 3
"""Of a streamed reply: the role, one a token, usage, and `[DONE]`."""
BYTES_PER_TOKEN: Final = 4
END_OF_TURN: Final = 2
_SYSTEM_BYTES: Final = 1500
_NUMBER: Final = "000000000000"
_encode: Final = msgspec.json.encode


@cache
def _text(size: int, seed: int) -> str:
    """Words with the entropy of prose, so that compression gains what it would gain on real prompts."""
    choose = random.Random(seed)
    words = ["".join(choose.choices("etaoinshrdlucmfw", k=choose.randint(2, 9))) for _ in range(1500)]
    text: list[str] = []
    length = 0
    while length < size:
        text.append(words[int(choose.paretovariate(0.6)) % len(words)])
        length += len(text[-1]) + 1
    return " ".join(text)[:size]


@cache
def _tokens(count: int, seed: int) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randint(1000, 40_000) for _ in range(count))


PIECES: Final = [f" {word}" for word in _text(REPLY_TOKENS * 8, 7).split()][:REPLY_TOKENS]
"""The text of each token of a reply in capture mode."""
CONTENT: Final = "".join(PIECES)


def messages(size: int) -> list[dict[str, Any]]:
    """A system prompt and questions, `size` bytes of JSON in all; the longer, the more messages (8 KB: 3)."""
    found: list[dict[str, Any]] = [{"role": "system", "content": _text(_SYSTEM_BYTES, 0)}]
    step = max(2400, size // 100)
    while (left := size - len(_encode(found))) > 40:
        found.append({"role": "user", "content": _text(min(step, left - 30), len(found))})
    return found


@dataclass(frozen=True)
class Body:
    """A request body, every copy with another number in its last message, so that no two are the same."""

    head: bytes
    tail: bytes

    def numbered(self, number: int) -> bytes:
        return self.head + b"%012d" % number + self.tail


@cache
def body(model: str, size: int, *, stream: bool, reply: str | None = None) -> Body:
    """A chat request for `exact` or `paced` (with ids) or `plain`. With `reply` it is the turn after that reply."""
    said = messages(size - 60 if reply is None else size - len(reply) - 120)
    if reply is not None:
        said.append({"role": "assistant", "content": reply})
    said.append({"role": "user", "content": f"question {_NUMBER}"})
    asked: dict[str, Any] = {"model": model, "messages": said, "max_tokens": 1024, "temperature": 1.0}
    if model != "plain":
        asked |= {"return_token_ids": True, "logprobs": True}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    head, _, tail = _encode(asked).partition(_NUMBER.encode())
    return Body(head, tail)


def tokens_for(size: int) -> int:
    """Prompt tokens of a body: that of the nearest of SIZES."""
    return min(SIZES.values(), key=lambda known: abs(known - size)) // BYTES_PER_TOKEN


def _usage(prompt_tokens: int) -> dict[str, int]:
    total = prompt_tokens + REPLY_TOKENS
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": REPLY_TOKENS}


def _logprob(index: int) -> dict[str, Any]:
    return {
        "token": PIECES[index],
        "logprob": -0.001234567 * (index % 97 + 1),
        "bytes": list(PIECES[index].encode()),
        "top_logprobs": [],
    }


@cache
def whole(prompt_tokens: int, ids: bool) -> bytes:
    """A reply that is not streamed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": CONTENT, "refusal": None, "tool_calls": []},
        "logprobs": {"content": [_logprob(index) for index in range(REPLY_TOKENS)]} if ids else None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    reply: dict[str, Any] = {
        "id": "chatcmpl-canned",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "canned",
        "choices": [choice],
        "usage": _usage(prompt_tokens),
    }
    if ids:
        choice["token_ids"] = _tokens(REPLY_TOKENS, 1)
        reply["prompt_token_ids"] = _tokens(prompt_tokens, 2)
    return _encode(reply)


@cache
def chat_events(prompt_tokens: int, ids: bool) -> tuple[bytes, ...]:
    """The events of a streamed reply."""
    sampled = _tokens(REPLY_TOKENS, 1)
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events = [_chat_event([first], **({"prompt_token_ids": _tokens(prompt_tokens, 2)} if ids else {}))]
    for index, piece in enumerate(PIECES):
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": piece},
            "logprobs": {"content": [_logprob(index)]} if ids else None,
            "finish_reason": "stop" if index == REPLY_TOKENS - 1 else None,
        }
        if ids:
            choice["token_ids"] = [sampled[index]]
        events.append(_chat_event([choice]))
    return (*events, _chat_event([], usage=_usage(prompt_tokens)), b"data: [DONE]\n\n")


def _chat_event(choices: list[Any], **more: Any) -> bytes:
    head = {"id": "chatcmpl-canned", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "canned"}
    return b"data: " + _encode({**head, "choices": choices, **more}) + b"\n\n"


def _sampled() -> list[int]:
    return [*_tokens(REPLY_TOKENS, 1)[:-1], END_OF_TURN]


def completion(prompt_ids: bytes, *, echo: bool) -> bytes:
    """A completion from ids that is not streamed, for tokens mode. `prompt_ids` is their JSON list."""
    names = [f"token_id:{token}" for token in _sampled()]
    logprobs = [-0.001234567 * (index % 97 + 1) for index in range(REPLY_TOKENS)]
    tops = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
    choice: dict[str, Any] = {
        "index": 0,
        "text": "".join(PIECES[:-1]),
        "logprobs": {"tokens": names, "token_logprobs": logprobs, "text_offset": [], "top_logprobs": tops},
        "finish_reason": "stop",
        "stop_reason": None,
    }
    if echo:
        choice["prompt_token_ids"] = msgspec.Raw(prompt_ids)
    head = {"id": "cmpl-canned", "object": "text_completion", "created": 1_790_000_000, "model": "canned"}
    return _encode({**head, "choices": [choice], "usage": _usage(prompt_ids.count(b",") + 1)})


def completion_events(prompt_ids: bytes, *, echo: bool) -> tuple[bytes, ...]:
    """The events of the same, streamed."""
    sampled = _sampled()
    events = []
    for index, token in enumerate(sampled):
        last = index == REPLY_TOKENS - 1
        name, logprob = f"token_id:{token}", -0.001234567 * (index % 97 + 1)
        logprobs = {
            "tokens": [name],
            "token_logprobs": [logprob],
            "text_offset": [0],
            "top_logprobs": [{name: logprob}],
        }
        choice: dict[str, Any] = {
            "index": 0,
            "text": "" if last else PIECES[index],
            "logprobs": logprobs,
            "finish_reason": "stop" if last else None,
            "stop_reason": None,
        }
        if echo and not index:
            choice["prompt_token_ids"] = msgspec.Raw(prompt_ids)
        events.append(_completion_event([choice]))
    return (*events, completion_end(prompt_ids), b"data: [DONE]\n\n")


def completion_end(prompt_ids: bytes) -> bytes:
    """The event with the usage of such a completion."""
    return _completion_event([], usage=_usage(prompt_ids.count(b",") + 1))


def _completion_event(choices: list[Any], **more: Any) -> bytes:
    head = {"id": "cmpl-canned", "object": "text_completion", "created": 1_790_000_000, "model": "canned"}
    return b"data: " + _encode({**head, "choices": choices, **more}) + b"\n\n"
