"""SGLang's adapter in front of the scripted server, which follows SGLang's source. Not run against a real SGLang."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from rollyard.gateway.engines import engines
from rollyard.gateway.engines.engine import EngineRequest
from rollyard.gateway.engines.upstream import http_client
from rollyard.gateway.scripted_llm import serve_app
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}
TEXT = "Having said hello, the assistant returns the answer. 😀"
CALL = {"name": "bash", "arguments": {"command": "ls"}}


async def test_tokens_mode_sends_ids_and_gets_ids(rig: Any, renderer: Renderer, joined: Any) -> None:
    prompt = renderer.prompt([USER], None)
    async with rig("sglang", {"content": TEXT, "tool_calls": [CALL]}) as r:
        reply = joined(await r.all(prompt_ids=prompt))
        [entry] = r.journal
        stopped = joined(await r.all(prompt_ids=prompt, params={"stop": [" said"]}))
        short = joined(await r.all(prompt_ids=prompt, params={"max_tokens": 3}))
    assert entry.prompt_token_ids == prompt.tolist()
    assert (reply.ids, reply.logprobs, reply.prompt) == (entry.token_ids, entry.logprobs, [])
    assert (reply.finish_reasons, reply.faults) == (["stop"], [])
    assert renderer.tokenizer.decode(TokenIds.of(reply.ids), True) == reply.text
    assert (reply.usages[0].prompt_tokens, reply.usages[0].completion_tokens) == (len(prompt), len(reply.ids))
    assert set(reply.versions) == {None}
    assert (stopped.text, stopped.stop_string) == ("Having", " said")
    assert (len(short.ids), short.finish_reasons) == (3, ["length"])


async def test_capture_mode_gets_the_ids_at_the_end(rig: Any, joined: Any) -> None:
    async with rig("sglang", {"reasoning": "hm", "content": TEXT, "tool_calls": [CALL]}, mode="capture") as r:
        reply = joined(await r.all(messages=[USER]))
        [entry] = r.journal
    assert (reply.prompt, reply.ids, reply.logprobs) == (entry.prompt_token_ids, entry.token_ids, entry.logprobs)
    assert (reply.reasoning, reply.text, reply.finish_reasons) == ("hm", TEXT, ["tool_calls"])


async def test_a_bare_prompt_is_continued_with_all_ids(rig: Any, joined: Any) -> None:
    async with rig("sglang", {"content": "{prompt} world"}, mode="capture") as r:
        reply = joined(await r.all(prompt="hello"))
        [entry] = r.journal
    assert (reply.prompt, reply.ids, reply.text) == (entry.prompt_token_ids, entry.token_ids, "hello world")


async def test_an_aborted_reply_is_gone_on_with_and_versions_are_told(
    rig: Any, renderer: Renderer, joined: Any
) -> None:
    prompt = renderer.prompt([USER], None)
    async with rig("sglang", {"content": TEXT, "chunk_delay_s": 0.01}) as r:
        await r.control.mark(r.server, 7)
        first = []
        async with aclosing(r.engine.generate(r.request(prompt_ids=prompt))) as chunks:
            async for chunk in chunks:
                first.append(chunk)
                if len(first) == 4:
                    await r.control.pause(r.server, abort=True)
        begun = joined(first)
        await r.control.load(r.server, "/checkpoints/8", 8)
        await r.control.resume(r.server)
        rest = joined(await r.all(prompt_ids=prompt + TokenIds.of(begun.ids)))
        whole = joined(await r.all(prompt_ids=prompt))
    assert (begun.finish_reasons, begun.faults) == (["abort"], [])
    assert begun.ids + rest.ids == whole.ids
    assert begun.logprobs + rest.logprobs == whole.logprobs
    assert (set(begun.versions), set(rest.versions)) == ({7}, {8})


async def test_a_held_reply_goes_on_by_itself_with_other_weights(rig: Any, renderer: Renderer, joined: Any) -> None:
    prompt = renderer.prompt([USER], None)
    async with rig("sglang", {"content": TEXT, "chunk_delay_s": 0.005}) as r:
        await r.control.mark(r.server, 7)
        found = []
        async for chunk in r.engine.generate(r.request(prompt_ids=prompt)):
            found.append(chunk)
            if len(found) == 4:
                await r.control.pause(r.server, abort=False)
                await r.control.mark(r.server, 8)
                await r.control.resume(r.server)
        reply = joined(found)
        assert reply.ids == r.journal[0].token_ids
    assert (reply.finish_reasons, reply.faults) == (["stop"], [])
    assert reply.versions == sorted(reply.versions)
    assert set(reply.versions) == {7, 8}


async def test_what_is_sent_to_sglang() -> None:
    asked: list[tuple[dict[str, Any], Any]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((await request.json(), request.headers))
        return web.Response(status=400)

    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="sglang", model="m")
        base = EngineRequest(
            call_id="c",
            server=server,
            params={"temperature": 0.5, "top_k": 0, "max_tokens": 9, "seed": 3, "stop": ["x"], "logit_bias": {"5": 1}},
            extras={"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}},
            messages=[USER],
        )
        tokens_request = structs.replace(base, prompt_ids=TokenIds.of([3, 4]))
        requests = (base, tokens_request, structs.replace(base, prompt="x", extras={}, params={}), tokens_request)
        for request in requests:
            with pytest.raises(ModelError):
                await anext(engines(client)["sglang"].generate(request))
    (chat, headers), (tokens, _), (bare, _), (again, _) = asked
    rids = [body.pop("rid") for body, _ in asked]
    assert len(set(rids)) == 4
    assert all(rid.startswith("c-") and len(rid) == len(rids[0]) for rid in rids)
    assert tokens == again
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    common = {"return_logprob": True, "logprob_start_len": -1, "stream": True}
    assert tokens == {
        **common,
        "input_ids": [3, 4],
        "return_prompt_token_ids": False,
        "sampling_params": {
            **neutral,
            "temperature": 0.5,
            "top_k": -1,
            "max_new_tokens": 9,
            "sampling_seed": 3,
            "stop": ["x"],
            "logit_bias": {"5": 1},
            "skip_special_tokens": False,
            "json_schema": '{"type":"array"}',
        },
    }
    assert bare == {
        **common,
        "text": "x",
        "return_prompt_token_ids": True,
        "sampling_params": {**neutral, "max_new_tokens": None, "skip_special_tokens": True},
    }
    assert (chat["logprobs"], chat["top_k"], chat["seed"], chat["max_tokens"]) == (True, -1, 3, 9)
    assert {name: value for name, value in headers.items() if "sglext" in name} == {
        "x-sglext-return-input-ids": "1",
        "x-sglext-return-output-ids": "1",
    }


@pytest.mark.parametrize("mode", ["tokens", "capture"])
async def test_an_agent_that_leaves_aborts_its_call_by_name(rig: Any, renderer: Renderer, mode: str) -> None:
    prompt = {"prompt_ids": renderer.prompt([USER], None)} if mode == "tokens" else {"messages": [USER]}
    async with rig("sglang", {"content": TEXT, "chunk_delay_s": 0.05}, mode=mode) as r:
        async with aclosing(r.engine.generate(r.request(**prompt))) as chunks:
            await anext(chunks)
        while not r.journal:  # noqa: ASYNC110 - the server writes it
            await asyncio.sleep(0.01)
        [entry] = r.journal
    assert entry.status == "aborted"
    assert len(entry.token_ids) < 5


async def test_aborts_are_tried_again_and_a_whole_reply_is_not_aborted(renderer: Renderer) -> None:
    seen: list[str] = []
    done = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        rid = (await request.json())["rid"]
        finish = {"type": "stop", "matched": 5} if rid.startswith("whole") else None
        meta = {"completion_tokens": 1, "prompt_tokens": 1, "finish_reason": finish}
        event = web.json_response({"text": "a", "output_ids": [5], "meta_info": meta}).text
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {event}\n\n".encode())
        if finish is None:
            await done.wait()
        return response

    async def abort(request: web.Request) -> web.Response:
        seen.append((await request.json())["rid"])
        if len(seen) < 3:
            return web.Response(status=503)
        done.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort)
    async with serve_app(app) as url, http_client() as client:
        engine = engines(client)["sglang"]
        server = LlmServer(server_id="s", url=url, engine="sglang", mode="tokens")
        for call_id in ("whole", "left"):
            request = EngineRequest(call_id=call_id, server=server, prompt_ids=TokenIds.of([1]))
            async with aclosing(engine.generate(request)) as chunks:
                async for _ in chunks:
                    break
        await done.wait()
    assert len(set(seen)) == 1
    assert len(seen) == 3
    assert seen[0].startswith("left-")


@pytest.mark.parametrize("mode", ["tokens", "capture"])
async def test_a_probe(rig: Any, mode: str) -> None:
    async with rig("sglang", {"content": TEXT}, mode=mode, max_model_len=77) as r:
        probe = await r.engine.probe(r.server)
        # A weight update from disk renames the model.
        await r.control.load(r.server, "/checkpoints/8", 8)
        assert (await r.engine.probe(r.server)).trainable
        counted = await r.engine.count(r.server, [USER])
    assert (probe.trainable, probe.reason, probe.max_context) == (True, "", 77)
    assert (probe.engine, probe.version) == ("sglang 0.5.23+scripted", "0.5.23+scripted")
    assert counted and counted > 3


async def test_a_server_of_another_kind() -> None:
    async with serve_app(web.Application()) as url, http_client() as client:
        with pytest.raises(ModelError, match="has no /server_info"):
            await engines(client)["sglang"].probe(LlmServer(server_id="s", url=url, engine="sglang"))
