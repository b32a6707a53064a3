"""Calls through a whole gateway: replies, records, and what comes before what."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from rollyard.gateway.history import common_prefix
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.packed import Logprobs, TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}]
CALL_BASH = {"content": "I list files.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}


async def read_stream(response: Any) -> list[Any]:
    data = [line[6:] async for line in response.content if line.startswith(b"data: ")]
    return [piece.strip() if piece.strip() == b"[DONE]" else msgspec.json.decode(piece) for piece in data]


async def test_a_reply_with_its_ids_in_the_log(stage: Any) -> None:
    await stage.model({"content": "hello world"})
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [USER])
    assert status == 200
    assert body["model"] == "gpt-x"
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "hello world")
    assert body["choices"][0]["finish_reason"] == "stop"

    [(_, intent), (_, end)] = await stage.events()
    [sampled] = stage.journal()
    assert isinstance(intent, CallIntent)
    assert isinstance(end, CallEnd)
    assert sampled.request_id == intent.call_id == end.call_id
    assert end.prompt_ids == TokenIds.of(sampled.prompt_token_ids)
    assert end.completion_ids == TokenIds.of(sampled.token_ids)
    assert end.logprobs == Logprobs.of(sampled.logprobs)
    assert (end.status, end.untrainable, end.policy_version, end.server) == ("ok", None, 7, "s1")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(sampled.prompt_token_ids) == end.usage.prompt_tokens
    assert usage["completion_tokens"] == len(sampled.token_ids) == end.usage.completion_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert intent.gateway == gateway.incarnation
    assert intent.params["top_k"] == 0 and intent.params["top_p"] == 1.0


async def test_a_conversation_is_logged_as_deltas_that_make_one_chain(stage: Any) -> None:
    await stage.model(CALL_BASH, {"content": "one file"}, {"content": "done"})
    gateway = await stage.gateway()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, USER]
    for _ in range(3):
        status, body = await stage.ask(gateway, messages, tools=TOOLS)
        assert status == 200
        reply = body["choices"][0]["message"]
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            assert call["id"].isalnum()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": "go on"})

    first, second, third = await stage.intents()
    assert [first.parent, second.parent, third.parent] == [None, first.call_id, second.call_id]
    assert [first.shared_messages, second.shared_messages, third.shared_messages] == [0, 3, 5]
    assert second.messages == [messages[3]]
    assert first.tools == TOOLS
    assert second.tools is third.tools is None
    whole = TokenIds()
    for end, sampled in zip(await stage.ends(), stage.journal(), strict=True):
        whole = whole[: end.shared_prompt_ids] + end.prompt_ids
        assert whole == TokenIds.of(sampled.prompt_token_ids)
        whole += end.completion_ids


async def test_tools_that_change_are_logged_anew(stage: Any) -> None:
    await stage.model({"content": "a"}, {"content": "b"})
    gateway = await stage.gateway()
    _, body = await stage.ask(gateway, [USER], tools=TOOLS)
    messages = [USER, body["choices"][0]["message"], USER]
    await stage.ask(gateway, messages)
    first, second = await stage.intents()
    assert first.tools == TOOLS
    assert second.parent == first.call_id
    assert second.tools == []


async def test_a_stream_says_nothing_to_act_on_before_the_end_is_logged(stage: Any) -> None:
    await stage.model(CALL_BASH)
    gateway = await stage.gateway()
    logged_before: list[int] = []
    text, calls, finish = "", [], None
    options = {"include_usage": True}
    async with stage.post(gateway, [USER], tools=TOOLS, stream=True, stream_options=options) as response:
        assert response.status == 200
        last: Any = None
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                last = line.strip() or last
                continue
            chunk = msgspec.json.decode(line[6:])
            for choice in chunk["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                assert not (delta.get("content") and (calls or finish)), "text after something to act on"
                if delta.get("tool_calls") or choice["finish_reason"]:
                    logged_before.append(len(await stage.ends()))
                calls += delta.get("tool_calls") or []
                finish = choice["finish_reason"] or finish
            usage = chunk.get("usage")
        assert last == b"data: [DONE]"
    assert logged_before and set(logged_before) == {1}
    assert text == "I list files."
    assert finish == "tool_calls"
    assert msgspec.json.decode(calls[0]["function"]["arguments"]) == {"command": "ls"}
    [end] = await stage.ends()
    assert end.reply["tool_calls"][0]["id"] == calls[0]["id"]
    assert usage["completion_tokens"] == len(end.completion_ids)


async def test_text_flows_before_the_call_ends(stage: Any) -> None:
    await stage.model({"content": "hello " * 8, "chunk_delay_s": 0.05})
    gateway = await stage.gateway()
    async with stage.post(gateway, [USER], stream=True) as response:
        seen = b""
        while b"ello" not in seen:
            seen += await response.content.readany()
        assert await stage.ends() == []
        assert len(await stage.intents()) == 1
        await response.read()
    assert [end.status for end in await stage.ends()] == ["ok"]


async def test_usage_only_where_it_is_asked_for(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    async with stage.post(gateway, [USER], stream=True) as response:
        chunks = await read_stream(response)
    assert chunks[-1] == b"[DONE]"
    assert not any("usage" in chunk for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


async def test_one_chain_when_a_session_moves_between_two_gateways(stage: Any) -> None:
    await stage.model(*({"content": f"hello {n}"} for n in range(6)))
    gateways = [await stage.gateway(), await stage.gateway()]
    messages: list[dict[str, Any]] = [USER]
    for turn in range(6):
        _, body = await stage.ask(gateways[turn % 2], messages)
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"next {turn}"}]
    intents = await stage.intents()
    assert [intent.parent for intent in intents] == [None, *(intent.call_id for intent in intents[:-1])]
    assert len({intent.gateway for intent in intents}) == 2
    assert all(len(intent.messages) == 1 for intent in intents)


async def test_a_cold_gateway_catches_up_from_the_log(stage: Any) -> None:
    await stage.model({"content": "one"}, {"content": "two"}, {"content": "three"})
    first = await stage.gateway()
    messages: list[dict[str, Any]] = [USER]
    for _ in range(2):
        _, body = await stage.ask(first, messages)
        messages += [body["choices"][0]["message"], USER]
    second = await stage.gateway()
    await stage.ask(second, messages)
    intents = await stage.intents()
    assert intents[2].parent == intents[1].call_id
    assert intents[2].shared_messages == 4


async def test_a_retry_and_a_fork_start_from_the_same_parent(stage: Any) -> None:
    await stage.model({"content": "one"}, {"content": "two"})
    gateway = await stage.gateway()
    _, body = await stage.ask(gateway, [USER])
    reply = body["choices"][0]["message"]
    for text in ("a", "a", "b"):
        await stage.ask(gateway, [USER, reply, {"role": "user", "content": text}])
    root, *others = await stage.intents()
    assert [intent.parent for intent in others] == [root.call_id] * 3


async def test_an_agent_that_leaves_ends_the_call_upstream(stage: Any) -> None:
    await stage.model({"content": "hello " * 200, "chunk_delay_s": 0.05})
    gateway = await stage.gateway()
    async with stage.post(gateway, [USER], stream=True) as response:
        seen = b""
        while b"ello" not in seen:
            seen += await response.content.readany()
        response.close()
    [end] = await stage.until(stage.ends)
    assert end.status == "aborted"
    assert end.error == "the agent went away"
    assert end.completion_ids

    async def aborted() -> bool:
        return [entry.status for entry in stage.journal()] == ["aborted"]

    await stage.until(aborted)


async def test_an_agent_that_leaves_before_the_first_byte(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 60})
    gateway = await stage.gateway()
    asking = asyncio.create_task(stage.ask(gateway, [USER]))
    await stage.until(stage.intents)
    asking.cancel()
    [end] = await stage.until(stage.ends)
    assert end.status == "aborted"
    assert end.reply is None


async def test_closing_a_session_aborts_its_calls_and_refuses_new_ones(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 60})
    gateway = await stage.gateway()
    asking = asyncio.create_task(stage.ask(gateway, [USER]))
    await stage.until(stage.intents)
    await stage.close_session()
    assert (await asking)[0] == 410
    [end] = await stage.until(stage.ends)
    assert (end.status, end.error, end.http_status) == ("aborted", "its session was closed", 410)
    status, body = await stage.ask(gateway, [USER])
    assert (status, body["error"]["code"]) == (410, "session_closed")
    cold = await stage.gateway()
    assert (await stage.ask(cold, [USER]))[0] == 410
    assert len(await stage.intents()) == 1


async def test_a_stream_that_breaks_upstream_is_cut_and_the_retry_is_whole(stage: Any) -> None:
    await stage.model({"content": "hello world, hello world", "break_after_tokens": 3, "fail_times": 1})
    gateway = await stage.gateway()
    async with stage.post(gateway, [USER], stream=True) as response:
        assert response.status == 200
        text = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            async for block in response.content.iter_any():
                text += block
    assert b"[DONE]" not in text
    assert b'"finish_reason":"' not in text
    assert b'"error"' in text
    await stage.until(stage.ends)

    async def answered() -> Any:
        status, body = await stage.ask(gateway, [USER])
        return body if status == 200 else None

    retry = await stage.until(answered)
    assert retry["choices"][0]["message"]["content"] == "hello world, hello world"
    broken, whole = await stage.ends()
    assert (broken.status, broken.finish_reason) == ("error", None)
    assert whole.status == "ok"
    assert common_prefix(broken.prompt_ids, whole.prompt_ids) == len(whole.prompt_ids)


async def test_a_server_that_fails_before_the_first_byte_is_left_for_another(stage: Any) -> None:
    fails = {"content": "never", "fail_status": 500, "fail_times": 100}
    await stage.model(fails, name="bad", models=["scripted"])
    await stage.model({"content": "hello"}, name="good")
    gateway = await stage.gateway()
    for rollout in range(4):
        status, _ = await stage.ask(gateway, [USER], key=stage.key(f"r{rollout}"))
        assert status == 200
        [end] = await stage.ends(f"r{rollout}")
        assert end.server == "good"


async def test_a_failed_call_is_data(stage: Any) -> None:
    await stage.model({"content": "never", "fail_status": 500, "fail_times": 100})
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [USER])
    assert status == 502
    assert "answered 500" in body["error"]["message"]
    [end] = await stage.until(stage.ends)
    assert (end.status, end.http_status, end.reply) == ("error", 502, None)
