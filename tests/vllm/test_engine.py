"""The adapter before a real vLLM: what tests/gateway/engines/test_vllm.py shows before the scripted one."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from rollyard.gateway.engines.tokenize import tokenize
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.schemas.errors import ModelError, PromptTooLong
from rollyard.schemas.packed import TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run",
        "parameters": {
            "type": "object",
            "properties": {"command": {"enum": ["ls"]}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "reply",
        # Within an object a grammar lets a model write blanks for as long as it likes.
        "schema": {"type": "string", "enum": ["yes", "no"]},
    },
}
MODES = pytest.mark.parametrize("mode", ["capture", "tokens", "bare"])
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def prompt_of(mode: str, renderer: Renderer, messages: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The prompt of a request, in each of the forms that the adapter takes."""
    messages = messages or [USER]
    if mode == "bare":
        return {"prompt": "".join(f"{message['content']}\n" for message in messages)}
    return {"messages": messages, **({"prompt_ids": renderer.prompt(messages, None)} if mode == "tokens" else {})}


@pytest.mark.parametrize("mode", ["capture", "tokens"])
async def test_a_probe(vllm: Any, mode: str) -> None:
    config = str(await vllm.get("/server_info?config_format=json"))
    probe = await vllm.engine.probe(structs.replace(vllm.server, mode=mode))
    assert (probe.trainable, probe.reason) == (True, "")
    assert probe.version == (await vllm.get("/version"))["version"]
    assert probe.engine == f"vllm {probe.version}"
    assert probe.max_context == 2048
    assert probe.logprob_kind == ("processed" if "processed_logprobs" in config else "raw")
    with pytest.raises(ModelError, match="does not serve 'other' but tiny"):
        await vllm.engine.probe(structs.replace(vllm.server, upstream_model="other", mode=mode))


async def test_capture_mode_has_every_id_and_logprob(vllm: Any, renderer: Renderer) -> None:
    reply = await vllm.ask(messages=[USER], params=NEUTRAL | {"max_tokens": 40, "seed": 7})
    assert reply.prompt == renderer.prompt([USER], None).tolist()
    assert len(reply.ids) == len(reply.logprobs) == reply.usage.completion_tokens == 40
    assert reply.usage.prompt_tokens == len(reply.prompt)
    assert np.isfinite(reply.logprobs).all()
    assert max(reply.logprobs) <= 0
    assert len(set(reply.logprobs)) > 30
    assert (reply.finish_reason, reply.faults, reply.constrained) == ("length", [], {None})
    assert reply.text


async def test_ids_as_a_prompt_are_continued_as_the_conversation_is(vllm: Any, renderer: Renderer) -> None:
    """The same seed: the same ids with the same logprobs, whoever renders and tokenises."""
    params = NEUTRAL | {"max_tokens": 40, "seed": 11}
    capture = await vllm.ask(messages=[USER], params=params)
    tokens = await vllm.ask(prompt_ids=renderer.prompt([USER], None), params=params)
    assert tokens.ids == capture.ids
    assert tokens.logprobs == pytest.approx(capture.logprobs, abs=1e-4)
    assert (tokens.prompt, tokens.usage) == ([], structs.replace(capture.usage, cached_tokens=0))
    assert (tokens.finish_reason, tokens.faults) == ("length", [])


async def test_ids_that_no_tokenizer_would_choose_are_taken_as_they_are(vllm: Any, renderer: Renderer) -> None:
    drifting = TokenIds.of([56, 565, 274])
    assert renderer.tokenizer.encode_plain(renderer.tokenizer.decode(drifting, False)) != drifting
    reply = await vllm.ask(prompt_ids=drifting)
    assert reply.usage.prompt_tokens == 3
    probe = await vllm.engine.probe(structs.replace(vllm.server, mode="tokens"))
    assert probe.trainable


async def test_a_bare_prompt_is_continued_with_all_ids(vllm: Any, renderer: Renderer) -> None:
    reply = await vllm.ask(prompt="hello world", params=NEUTRAL | {"max_tokens": 12, "seed": 1})
    assert reply.prompt == renderer.tokenizer.encode_plain("hello world").tolist()
    assert len(reply.ids) == len(reply.logprobs) == reply.usage.completion_tokens == 12
    assert (reply.finish_reason, reply.faults) == ("length", [])


@MODES
async def test_an_end_of_turn_is_the_last_id(vllm: Any, renderer: Renderer, mode: str) -> None:
    [end] = [renderer.tokenizer.specials["<|im_end|>"]]
    bias = {"logit_bias": {str(end): 100.0}}
    reply = await vllm.ask(**prompt_of(mode, renderer), params=NEUTRAL | bias | {"max_tokens": 9})
    assert (reply.ids, reply.finish_reason, reply.stop_string) == ([end], "stop", None)
    assert len(reply.logprobs) == reply.usage.completion_tokens == 1
    assert reply.text == ""


@MODES
async def test_a_stop_string_ends_the_reply_within_its_ids(vllm: Any, renderer: Renderer, mode: str) -> None:
    params = NEUTRAL | {"max_tokens": 30, "seed": 5}
    whole = await vllm.ask(**prompt_of(mode, renderer), params=params)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]
    reply = await vllm.ask(**prompt_of(mode, renderer), params=params | {"stop": [stop]})
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert (reply.stop_string, reply.finish_reason) == (stop, "stop")
    assert 0 < len(reply.ids) < len(whole.ids)
    assert reply.ids == whole.ids[: len(reply.ids)]
    assert len(reply.logprobs) == reply.usage.completion_tokens == len(reply.ids)


@MODES
async def test_as_many_tokens_as_are_asked_for(vllm: Any, renderer: Renderer, mode: str) -> None:
    for count in (1, 17):
        reply = await vllm.ask(**prompt_of(mode, renderer), params={"max_tokens": count, "ignore_eos": True})
        assert (len(reply.ids), reply.finish_reason) == (count, "length")


async def test_a_reply_is_as_long_as_the_context_lasts(vllm: Any, renderer: Renderer) -> None:
    """Without a limit in capture mode; in tokens mode the adapter wants one, as vLLM would cut at 16 tokens."""
    messages = [{"role": "user", "content": "hello " * 2000}]
    messages[0]["content"] = messages[0]["content"][: 6 * (2048 - len(renderer.prompt([USER], None)) - 20)]
    room = 2048 - len(renderer.prompt(messages, None))
    assert 0 < room < 40
    reply = await vllm.ask(messages=messages, params={"ignore_eos": True})
    assert (len(reply.ids), reply.finish_reason) == (room, "length")
    reply = await vllm.ask(prompt_ids=renderer.prompt(messages, None), params={"max_tokens": room, "ignore_eos": True})
    assert (len(reply.ids), reply.finish_reason) == (room, "length")
    with pytest.raises(ModelError, match="how long a reply"):
        await vllm.ask(prompt_ids=renderer.prompt(messages, None), params={})


@MODES
async def test_a_prompt_over_the_context(vllm: Any, renderer: Renderer, mode: str) -> None:
    with pytest.raises(PromptTooLong) as failed:
        await vllm.ask(**prompt_of(mode, renderer, [{"role": "user", "content": "hello " * 2500}]))
    assert (failed.value.status, failed.value.retryable) == (400, False)


@MODES
async def test_a_model_that_is_not_there(vllm: Any, renderer: Renderer, mode: str) -> None:
    with pytest.raises(ModelError, match="other") as failed:
        await vllm.ask(**prompt_of(mode, renderer), server=structs.replace(vllm.server, upstream_model="other"))
    assert (failed.value.status, failed.value.retryable) == (404, False)


@MODES
async def test_a_parameter_that_is_wrong(vllm: Any, renderer: Renderer, mode: str) -> None:
    with pytest.raises(ModelError, match="top_p") as failed:
        await vllm.ask(**prompt_of(mode, renderer), params={"max_tokens": 4, "top_p": 7.0})
    assert (failed.value.status, failed.value.retryable) == (400, False)
    assert not isinstance(failed.value, PromptTooLong)


@MODES
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.3},
        {"temperature": 0.0},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        {"logit_bias": {"5": -100.0}},
        {"unheard_of": 1},
    ],
    ids=lambda params: next(iter(params)),
)
async def test_sampling_parameters_are_taken(vllm: Any, renderer: Renderer, mode: str, params: dict[str, Any]) -> None:
    reply = await vllm.ask(**prompt_of(mode, renderer), params=NEUTRAL | {"max_tokens": 6} | params)
    assert len(reply.ids) == len(reply.logprobs) == reply.usage.completion_tokens == 6
    assert (reply.faults, np.isfinite(reply.logprobs).all()) == ([], True)


@pytest.mark.parametrize(
    "extras",
    [{"reasoning_effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")]
    + [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"unheard_of": {"a": 1}},
    ],
    ids=str,
)
async def test_what_agents_send_besides_is_taken(vllm: Any, extras: dict[str, Any]) -> None:
    tools = [TOOL] if "tool_choice" in extras else None
    reply = await vllm.ask(messages=[USER], tools=tools, extras=extras)
    assert 0 < len(reply.ids) <= 8


@MODES
async def test_a_schema_holds_the_reply(vllm: Any, renderer: Renderer, mode: str) -> None:
    kind = (await vllm.engine.probe(vllm.server)).logprob_kind
    server = structs.replace(vllm.server, logprob_kind=kind)
    params = {"max_tokens": 300}
    request = prompt_of(mode, renderer) | {"params": params, "extras": {"response_format": SCHEMA}}
    reply = await vllm.ask(server=server, **request)
    assert json.loads(reply.text) in ("yes", "no")
    assert len(reply.ids) == len(reply.logprobs) == reply.usage.completion_tokens
    assert np.isfinite(reply.logprobs).all()
    assert {bool(each) for each in reply.constrained} == {kind == "raw"}
    # The ids say more than the text: the end of the turn, and which tokens wrote it.
    assert renderer.tokenizer.decode(TokenIds.of(reply.ids), True) == reply.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bash"}}], ids=str)
async def test_a_tool_choice_holds_the_reply(vllm: Any, choice: Any) -> None:
    """To a call, whose arguments are any JSON: only a tool that is `strict` has its schema kept."""
    kind = (await vllm.engine.probe(vllm.server)).logprob_kind
    server = structs.replace(vllm.server, logprob_kind=kind)
    params = {"max_tokens": 60, "seed": 1}
    reply = await vllm.ask(server=server, messages=[USER], tools=[TOOL], extras={"tool_choice": choice}, params=params)
    assert reply.calls[0]["function"]["name"] == "bash"
    assert "".join(call["function"].get("arguments") or "" for call in reply.calls)
    assert len(reply.ids) == len(reply.logprobs) == reply.usage.completion_tokens
    assert reply.finish_reason in ("tool_calls", "stop", "length")
    assert {bool(each) for each in reply.constrained} == {kind == "raw"}


@MODES
@pytest.mark.parametrize("after", [0, 3])
async def test_a_client_that_leaves_ends_the_call(vllm: Any, renderer: Renderer, mode: str, after: int) -> None:
    """After the first piece, or in the middle of the reply."""
    await vllm.idle()
    before = await vllm.metric("vllm:generation_tokens_total")
    params = {"max_tokens": 1500, "ignore_eos": True}
    async with aclosing(vllm.generate(**prompt_of(mode, renderer), params=params)) as chunks:
        for _ in range(after + 1):
            await anext(chunks)
    await vllm.idle()
    assert await vllm.metric("vllm:generation_tokens_total") - before < 1000


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "tools"])
async def test_counting_is_exact(vllm: Any, renderer: Renderer, tools: Any) -> None:
    messages = [{"role": "system", "content": "You help. <|im_end|>"}, USER | {"content": "héllo 😀 <|im_start|>"}]
    counted = await vllm.engine.count(vllm.server, messages, tools)
    reply = await vllm.ask(messages=messages, tools=tools)
    assert counted == len(reply.prompt) == reply.usage.prompt_tokens


@pytest.mark.parametrize("content", ["hello", "héllo 😀\n\n  x = 12345", "<think>\nhm\n</think>\n\nyes"])
async def test_the_gateway_renders_and_tokenises_as_vllm_does(vllm: Any, renderer: Renderer, content: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
    ]
    assert await tokenize(vllm.client, vllm.server, messages, [TOOL]) == renderer.prompt(messages, [TOOL])
