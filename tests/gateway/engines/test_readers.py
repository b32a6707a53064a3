"""What engines make of a stream of bytes: the same however it is split, and no exception for any number in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from rollyard.gateway.engines.chat_upstream import ChatReader
from rollyard.gateway.engines.completions_upstream import CompletionReader
from rollyard.gateway.engines.engine import EngineChunk
from rollyard.gateway.engines.llamacpp import CompletionReader as LlamaCppReader
from rollyard.gateway.engines.sglang_generate import GenerateReader
from rollyard.gateway.engines.sse import EventReader
from rollyard.schemas.call import Usage
from rollyard.schemas.errors import ModelError, PromptTooLong
from rollyard.schemas.packed import Logprobs, TokenIds

Read = Callable[[bytes], EngineChunk]
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}


def chat() -> ChatReader:
    return ChatReader("http://m", with_ids=True)


def completion() -> CompletionReader:
    return CompletionReader("http://m", with_ids=True, resumable=True)


def generate() -> GenerateReader:
    return GenerateReader("http://m", resumable=True)


def llamacpp() -> LlamaCppReader:
    return LlamaCppReader("http://m")


def vllm_chat_events() -> list[Any]:
    def choice(delta: Any, ids: Any, **more: Any) -> Any:
        logprobs = {"content": [{"token": "x", "logprob": -0.5 * number, "bytes": []} for number in ids]}
        return {"choices": [{"index": 0, "delta": delta, "token_ids": ids, "logprobs": logprobs, **more}]}

    return [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [7, 8]},
        choice({"reasoning": "hm"}, [1]),
        choice({"content": "é😀"}, [2], finish_reason=None),
        choice({"tool_calls": [{"index": 0}]}, [3], finish_reason="stop", stop_reason="END"),
        {"choices": [], "usage": USAGE},
    ]


def vllm_completion_events() -> list[Any]:
    def choice(text: str, ids: list[int], **more: Any) -> Any:
        logprobs = {"tokens": [f"token_id:{n}" for n in ids], "token_logprobs": [-0.5 * n for n in ids]}
        return {"choices": [{"index": 0, "text": text, "logprobs": logprobs, **more}]}

    return [
        choice("hm", [1], prompt_token_ids=[7, 8]),
        choice("é😀", [2, 3], finish_reason="stop", stop_reason="END"),
        {"choices": [], "usage": USAGE},
    ]


def sglang_events(*, incremental: bool) -> list[Any]:
    texts, reason = ["hm", "é", "😀"], {"type": "stop", "matched": "END"}
    events = []
    for count in (1, 2, 3):
        since = count - 1 if incremental else 0
        triples = [[-0.5 * n, n, None] for n in (1, 2, 3)][since:count]
        meta = {
            "finish_reason": reason if count == 3 else None,
            "prompt_tokens": 2,
            "completion_tokens": count,
            "cached_tokens": 1,
            "weight_version": "7",
            "output_token_logprobs": triples,
        }
        events.append(
            {
                "text": "".join(texts[since:count]),
                "output_ids": [1, 2, 3][since:count],
                "prompt_token_ids": [7, 8],
                "meta_info": meta,
            }
        )
    return events


def llamacpp_events() -> list[Any]:
    events: list[Any] = [
        {
            "content": text,
            "tokens": [n],
            "completion_probabilities": [{"id": n, "logprob": -0.5 * n}],
            "tokens_predicted": n,
            "stop": False,
        }
        for n, text in ((1, "hm"), (2, "é"), (3, "😀"))
    ]
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "word", "stopping_word": "END"}
    return [*events, {**last, "tokens_predicted": 3, "tokens_evaluated": 2, "timings": {"cache_n": 1}}]


STREAMS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "vllm chat": (chat, vllm_chat_events()),
    "vllm completion": (completion, vllm_completion_events()),
    "sglang": (generate, sglang_events(incremental=False)),
    "sglang incremental": (generate, sglang_events(incremental=True)),
    "llamacpp": (llamacpp, llamacpp_events()),
}


def chunks(make: Callable[[], Any], blocks: list[bytes]) -> list[EngineChunk]:
    events, reader = EventReader(), make()
    return [reader.read(event) for block in blocks for event in events.feed(block)]


def sent(events: list[Any], newline: bytes = b"\n") -> bytes:
    return b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + newline * 2 for e in events)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_reply_split_at_every_byte(name: str, newline: bytes, joined: Any) -> None:
    make, events = STREAMS[name]
    stream = sent(events, newline)
    whole = chunks(make, [stream])
    for at in range(len(stream)):
        assert chunks(make, [stream[:at], stream[at:]]) == whole, at

    reply = joined(whole)
    assert reply.ids == [1, 2, 3]
    assert reply.logprobs == [-0.5, -1.0, -1.5]
    assert reply.reasoning + reply.text == "hmé😀"
    assert (reply.finish_reasons, reply.stop_string, reply.faults) == (["stop"], "END", [])
    assert reply.usages == [Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)]
    if name != "llamacpp":
        assert reply.prompt == [7, 8]
    assert reply.versions[-1] == (7 if name.startswith("sglang") else None)


def one(read: Read, event: Any) -> EngineChunk:
    return read(event if isinstance(event, bytes) else json.dumps(event).encode())


BAD_IDS = [[1, None], [1, -1], [1, math.nan], [1, 2**32], [1, 10**30], [1, 1.5], "12", [True], [[1]], {"a": 1}]


@pytest.mark.parametrize("ids", BAD_IDS, ids=str)
def test_ids_that_are_none_are_a_fault_and_no_exception(ids: Any) -> None:
    listed = ids if isinstance(ids, list) else [ids]
    names = [f"token_id:{n}" for n in listed]
    told = [
        one(chat().read, {"choices": [{"delta": {}, "token_ids": ids}]}),
        one(chat().read, {"prompt_token_ids": ids}),
        one(chat().read, {"sglext": {"output_ids": [ids]}}),
        one(completion().read, {"choices": [{"logprobs": {"tokens": names, "token_logprobs": [-1.0, -1.0]}}]}),
        one(completion().read, {"choices": [{"prompt_token_ids": ids}]}),
        one(generate().read, {"output_ids": listed, "meta_info": {"completion_tokens": len(listed)}}),
        one(generate().read, {"prompt_token_ids": ids}),
        one(llamacpp().read, {"tokens": ids, "tokens_predicted": 2}),
    ]
    if ids == "12":
        told.pop(3)  # token_id:12 is an id
    assert all(chunk.fault for chunk in told)
    assert not any(chunk.token_ids or chunk.prompt_ids for chunk in told)


BAD_LOGPROBS = [math.nan, math.inf, -math.inf, None, "x", -9999.0]


@pytest.mark.parametrize("value", BAD_LOGPROBS, ids=str)
def test_logprobs_that_are_not_finite_arrive_as_such(value: Any) -> None:
    logprobs = [
        one(chat().read, {"choices": [{"logprobs": {"content": [{"logprob": value}]}}]}).logprobs,
        one(
            completion().read, {"choices": [{"logprobs": {"tokens": ["token_id:5"], "token_logprobs": [value]}}]}
        ).logprobs,
        one(
            generate().read,
            {"output_ids": [5], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[value, 5, None]]}},
        ).logprobs,
        one(
            llamacpp().read,
            {"tokens": [5], "completion_probabilities": [{"id": 5, "logprob": value}], "tokens_predicted": 1},
        ).logprobs,
    ]
    for found in logprobs:
        assert found is not None
        assert len(found) == 1
        assert not math.isfinite(found[0])


@pytest.mark.parametrize("make", [chat, completion, generate, llamacpp])
def test_events_that_cannot_be_read(make: Callable[[], Any]) -> None:
    for event in (
        b"{",
        b"[]",
        b'{"choices": 5, "meta_info": 5, "content": 5}',
        b'{"content": "\xff", "text": "\xff"}x',
    ):
        with pytest.raises(ModelError, match="cannot be read"):
            make().read(event)
    with pytest.raises(ModelError, match="answered 500: CUDA") as failed:
        one(make().read, {"error": "CUDA"})
    assert failed.value.retryable
    with pytest.raises(PromptTooLong):
        one(make().read, {"error": {"message": "longer than the model's context length (5 tokens)", "code": 400}})


def test_nulls_are_missing_fields() -> None:
    read = one(chat().read, {"choices": [{"delta": None, "token_ids": None, "logprobs": None}], "usage": None})
    assert read == EngineChunk()
    assert one(chat().read, {"choices": None}) == EngineChunk()
    assert one(completion().read, {"choices": [{"text": None, "logprobs": None, "prompt_token_ids": None}]}).text == ""


def test_tokens_that_are_not_named_by_id_are_a_fault() -> None:
    named = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}]}
    assert "token_id:N" in (one(completion().read, named).fault or "")


def test_an_abort_is_the_end_of_a_piece_or_an_error() -> None:
    vllm = {"choices": [{"text": "", "finish_reason": "abort", "logprobs": {"tokens": [], "token_logprobs": []}}]}
    sglang = {"meta_info": {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}}
    assert one(completion().read, vllm).finish_reason == "abort"
    assert one(generate().read, sglang).finish_reason == "abort"
    for read, event in (
        (CompletionReader("http://m", with_ids=True, resumable=False).read, vllm),
        (GenerateReader("http://m", resumable=False).read, sglang),
        (chat().read, {"choices": [{"delta": {}, "finish_reason": "abort"}]}),
    ):
        with pytest.raises(ModelError, match="aborted the call") as failed:
            one(read, event)
        assert failed.value.retryable


def test_sglang_says_why_it_could_not_go_on() -> None:
    reason = {"type": "abort", "message": "out of memory", "status_code": 503}
    with pytest.raises(ModelError, match="answered 503: out of memory") as failed:
        one(generate().read, {"output_ids": [1], "meta_info": {"finish_reason": reason, "completion_tokens": 1}})
    assert failed.value.retryable


def test_an_abort_of_incremental_sglang_repeats_what_is_out(joined: Any) -> None:
    """As its tokenizer manager does: the last id again, behind ids that are new, and all logprobs."""
    first, second, _ = sglang_events(incremental=True)
    triples = [[-0.5 * n, n, None] for n in (1, 2, 3)]
    meta = {"finish_reason": {"type": "abort"}, "completion_tokens": 3, "output_token_logprobs": triples}
    for new in ([3], [3, 3]):
        aborted = {"text": "hmé😀", "output_ids": new, "meta_info": meta}
        reply = joined(chunks(generate, [sent([first, second, aborted])]))
        assert (reply.ids, reply.logprobs, reply.faults) == ([1, 2, 3], [-0.5, -1.0, -1.5], [])
        assert reply.finish_reasons == ["abort"]
    nothing_new = {**meta, "completion_tokens": 2, "output_token_logprobs": triples[:2]}
    reply = joined(chunks(generate, [sent([first, second, {"output_ids": [2], "meta_info": nothing_new}])]))
    assert (reply.ids, reply.logprobs, reply.text, reply.faults) == ([1, 2], [-0.5, -1.0], "hmé", [])


def test_sglang_ids_that_do_not_add_up_are_a_fault(joined: Any) -> None:
    first, _, last = sglang_events(incremental=True)
    reply = joined(chunks(generate, [sent([first, last])]))
    assert reply.faults == ["SGLang counted 3 sampled ids, after 1 it returned 1"]
    swapped = {"output_ids": [1], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 2, None]]}}
    assert "of other ids" in (one(generate().read, swapped).fault or "")
    without = one(generate().read, {"output_ids": [1], "meta_info": {"completion_tokens": 1}})
    assert (without.token_ids, without.logprobs) == (TokenIds.of([1]), Logprobs())


def test_sglang_versions_that_are_no_numbers_are_not_told() -> None:
    for told, version in (("12", 12), ("default", None), (None, None), ("-1", None), ("v3", None)):
        assert one(generate().read, {"meta_info": {"weight_version": told}}).policy_version == version


def test_llama_cpp_ids_that_were_withheld_are_a_fault() -> None:
    told = {"tokens": [5], "completion_probabilities": [{"id": 5, "logprob": -1}], "tokens_predicted": 3}
    assert "reported 1 of 3 sampled ids" in (one(llamacpp().read, told).fault or "")
    assert "without their logprobs" in (one(llamacpp().read, {**told, "completion_probabilities": []}).fault or "")
