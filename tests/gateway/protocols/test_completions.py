from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Waiting
from rollyard.gateway.protocols.completions import CompletionsProtocol
from rollyard.gateway.protocols.protocol import Protocol
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Usage
from rollyard.schemas.packed import TokenIds

COMPLETIONS: Protocol = CompletionsProtocol()


def parse(prompt: Any = "once", **body: Any) -> ModelRequest:
    return COMPLETIONS.parse(msgspec.json.encode({"prompt": prompt, **body}), {})


def finished(text: str, choice: int = 0, finish_reason: str = "stop") -> Finished:
    usage = Usage(prompt_tokens=5, completion_tokens=2)
    return Finished(f"id{choice}", 9, {"role": "assistant", "content": text}, finish_reason, usage, choice=choice)


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part and not part.startswith(b":")]
    return [part if part == b"[DONE]" else msgspec.json.decode(part) for part in parts]


def test_what_a_request_says() -> None:
    request = parse(
        model="m",
        max_tokens=3,
        stop="x",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.5,
        logprobs=5,
        best_of=2,
        suffix="",
        echo=False,
        user="u",
        metadata={"session_id": "s"},
    )
    assert request == ModelRequest(
        messages=[],
        protocol="completions",
        model="m",
        prompt="once",
        params={"max_tokens": 3, "stop": ["x"], "temperature": 0.5},
        n=2,
        stream=True,
        include_usage=True,
        context={"metadata": {"session_id": "s"}},
    )


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("once", "once", None),
        (["once"], "once", None),
        ([1, 2, 3], "", TokenIds.of([1, 2, 3])),
        ([[1, 2]], "", TokenIds.of([1, 2])),
    ],
)
def test_prompts(prompt: Any, text: str, ids: TokenIds | None) -> None:
    request = parse(prompt)
    assert request.prompt == text
    assert request.context.get("prompt_ids") == ids
    assert request.params == {"max_tokens": 16}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt", "empty"),
        ({"prompt": ["a", "b"]}, "prompt", "holds 2 prompts"),
        ({"prompt": [[1], [2]]}, "prompt", "holds 2 prompts"),
        ({"prompt": [1, "a"]}, "prompt", "holds 2 prompts"),
        ({"prompt": [1, -1]}, "prompt", "neither text nor token ids"),
        ({"prompt": [1.5]}, "prompt", "neither text nor token ids"),
        ({"prompt": [True]}, "prompt", "neither text nor token ids"),
        ({"prompt": [2**40]}, "prompt", "neither text nor token ids"),
        ({"prompt": {"a": 1}}, "prompt", "Expected"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "echo": True}, "echo", "not supported"),
        ({"prompt": "a", "best_of": 2}, "best_of", "ask for n replies"),
        ({"prompt": "a", "n": 99}, "n", "the most is 16"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_what_is_not_acceptable_names_its_field(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        COMPLETIONS.parse(msgspec.json.encode(body), {})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in str(caught.value)


def test_a_whole_reply() -> None:
    body = msgspec.json.decode(
        COMPLETIONS.reply(parse(model="m", n=2), [finished("b", 1, "length"), finished("a", 0, "tool_calls")])
    )
    assert body["id"] == "cmpl-id0"
    assert (body["object"], body["created"], body["model"]) == ("text_completion", 9, "m")
    assert body["choices"] == [
        {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": None},
        {"index": 1, "text": "b", "finish_reason": "length", "logprobs": None},
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 4)


def test_a_stream() -> None:
    stream = COMPLETIONS.stream(parse(n=2, stream_options={"include_usage": True}))
    updates = [
        Waiting("id0", 9),
        Started("id0", 9),
        Delta("id0", 9, "up"),
        Delta("id0", 9, "", "hm"),
        finished("down", 1),
        finished("upon", finish_reason="length"),
    ]
    chunks = events(b"".join(stream.events(update) for update in updates))
    assert [chunk["choices"][0] for chunk in chunks[:3]] == [
        {"index": 0, "text": "up", "finish_reason": None, "logprobs": None},
        {"index": 1, "text": "down", "finish_reason": "stop", "logprobs": None},
        {"index": 0, "text": "on", "finish_reason": "length", "logprobs": None},
    ]
    assert (chunks[3]["choices"], chunks[3]["usage"]["completion_tokens"]) == ([], 4)
    assert chunks[4:] == [b"[DONE]"]
    assert {(chunk["id"], chunk["object"]) for chunk in chunks[:4]} == {("cmpl-id0", "text_completion")}


def test_errors() -> None:
    refusal = Refusal(429, "server_overloaded", "too much")
    status, body = COMPLETIONS.refuse(refusal)
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (429, "rate_limit_exceeded")
    [error] = events(COMPLETIONS.stream(parse()).error(refusal))
    assert error["error"]["message"] == "too much"
