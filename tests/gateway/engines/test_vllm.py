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
from rollyard.schemas.errors import ModelError, PromptTooLong
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}
TEXT = "Having said hello, the assistant returns the answer. 😀"
CALL = {"name": "bash", "arguments": {"command": "ls"}}


async def test_tokens_mode_sends_ids_and_gets_ids(rig: Any, renderer: Renderer, joined: Any) -> None:
    prompt = renderer.prompt([USER], None)
    async with rig("vllm", {"content": TEXT, "tool_calls": [CALL]}) as r:
        reply = joined(await r.all(prompt_ids=prompt))
        [entry] = r.journal

    assert entry.prompt_token_ids == prompt.tolist()
    assert reply.ids == entry.token_ids
    assert reply.logprobs == entry.logprobs
    assert reply.prompt == []
    assert reply.finish_reasons == ["stop"]
    assert reply.text.startswith(TEXT + "\n<tool_call>")
    assert renderer.tokenizer.decode(TokenIds.of(reply.ids), True) == reply.text
    assert (reply.usages[0].prompt_tokens, reply.usages[0].completion_tokens) == (len(prompt), len(reply.ids))
    assert reply.faults == []


async def test_capture_mode_gets_the_ids_that_the_server_made(rig: Any, joined: Any) -> None:
    async with rig("vllm", {"reasoning": "hm", "content": TEXT, "tool_calls": [CALL]}, mode="capture") as r:
        chunks = await r.all(messages=[USER])
        reply = joined(chunks)
        [entry] = r.journal
    assert (reply.prompt, reply.ids, reply.logprobs) == (entry.prompt_token_ids, entry.token_ids, entry.logprobs)
    assert (reply.reasoning, reply.text) == ("hm", TEXT)
    assert reply.finish_reasons == ["tool_calls"]
    functions = [call["function"] for chunk in chunks for call in chunk.tool_calls]
    assert functions == [{"name": "bash"}, {"arguments": '{"command": "ls"}'}]


async def test_a_bare_prompt_is_continued_with_all_ids(rig: Any, renderer: Renderer, joined: Any) -> None:
    async with rig("vllm", {"content": "{prompt} world"}, mode="capture") as r:
        reply = joined(await r.all(prompt="hello"))
        [entry] = r.journal
    assert reply.prompt == entry.prompt_token_ids == renderer.tokenizer.encode_plain("hello").tolist()
    assert (reply.ids, reply.logprobs) == (entry.token_ids, entry.logprobs)
    assert reply.text == "hello world"


async def test_stop_strings_and_limits(rig: Any, renderer: Renderer, joined: Any) -> None:
    prompt = renderer.prompt([USER], None)
    async with rig("vllm", {"content": TEXT}) as r:
        stopped = joined(await r.all(prompt_ids=prompt, params={"max_tokens": 500, "stop": [" said"]}))
        short = joined(await r.all(prompt_ids=prompt, params={"max_tokens": 3}))
        with pytest.raises(ModelError, match="how long a reply") as unlimited:
            await r.all(prompt_ids=prompt, params={})
        with pytest.raises(PromptTooLong):
            await r.all(prompt_ids=prompt + TokenIds.of([5] * 40_000))
    assert (stopped.text, stopped.stop_string, stopped.finish_reasons) == ("Having", " said", ["stop"])
    assert (len(short.ids), short.finish_reasons) == (3, ["length"])
    assert "max_context" in unlimited.value.hint


async def test_an_aborted_reply_is_gone_on_with(rig: Any, renderer: Renderer, joined: Any) -> None:
    """What was sampled before and after the pause is, id for id, what one reply without a pause is."""
    prompt = renderer.prompt([USER], None)
    async with rig("vllm", {"content": TEXT, "chunk_delay_s": 0.01}) as r:
        first = []
        async with aclosing(r.engine.generate(r.request(prompt_ids=prompt))) as chunks:
            async for chunk in chunks:
                first.append(chunk)
                if len(first) == 4:
                    await r.control.pause(r.server, abort=True)
        begun = joined(first)
        assert (begun.finish_reasons, begun.faults) == (["abort"], [])
        assert begun.usages[-1].completion_tokens == len(begun.ids)

        waiting = asyncio.ensure_future(r.all(prompt_ids=prompt + TokenIds.of(begun.ids)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await r.control.mark(r.server, 8)
        await r.control.resume(r.server)
        rest = joined(await waiting)
        whole = joined(await r.all(prompt_ids=prompt))
        journal = r.journal

    assert 3 <= len(begun.ids) < len(whole.ids)
    assert begun.ids + rest.ids == whole.ids
    assert begun.logprobs + rest.logprobs == whole.logprobs
    assert begun.text + rest.text == whole.text == TEXT
    assert [entry.status for entry in journal] == ["aborted", "ok", "ok"]
    assert journal[0].token_ids == begun.ids


async def test_an_aborted_reply_in_capture_mode_is_an_error(rig: Any) -> None:
    async with rig("vllm", {"content": TEXT, "finish_reason": "abort"}, mode="capture") as r:
        with pytest.raises(ModelError, match="aborted the call") as failed:
            await r.all(messages=[USER])
    assert failed.value.retryable


async def test_what_is_sent_to_vllm(renderer: Renderer) -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=400)

    app = web.Application()
    app.router.add_post("/v1/{path:.*}", handler)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="vllm", model="m")
        base = EngineRequest(
            call_id="c",
            server=server,
            params={"temperature": 0.5, "top_k": 0, "max_tokens": 9, "repetition_penalty": 1.1},
            extras={"tool_choice": "required", "response_format": {"type": "json_object"}},
            messages=[USER],
            tools=[{"type": "function"}],
        )
        for request in (base, structs.replace(base, prompt_ids=TokenIds.of([3, 4])), structs.replace(base, prompt="x")):
            with pytest.raises(ModelError):
                await anext(engines(client)["vllm"].generate(request))
    chat, tokens, bare = bodies
    common = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_k": 0,
        "max_tokens": 9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "json_object"},
    }
    named = {"logprobs": 0, "return_tokens_as_token_ids": True}
    assert tokens == {**common, **named, "prompt": [3, 4], "skip_special_tokens": False}
    assert bare == {**common, **named, "prompt": "x", "return_token_ids": True}
    assert chat == {
        **common,
        "messages": [USER],
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }


@pytest.mark.parametrize(
    ("extras", "says"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "tool_choice": "auto"}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format json_schema"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ],
)
async def test_constrained_sampling_is_told(rig: Any, extras: dict[str, Any], says: str | None) -> None:
    async with rig("vllm", {"content": "a"}, mode="capture") as r:
        for chunk in await r.all(messages=[USER], extras=extras):
            assert (chunk.constrained or "").startswith(says or "")
            assert bool(chunk.constrained) == bool(says)
        r.server = structs.replace(r.server, logprob_kind="processed")
        assert not any(chunk.constrained for chunk in await r.all(messages=[USER], extras=extras))


@pytest.mark.parametrize("mode", ["tokens", "capture"])
async def test_a_probe(rig: Any, mode: str) -> None:
    async with rig("vllm", {"content": TEXT}, mode=mode, max_model_len=77) as r:
        probe = await r.engine.probe(r.server)
        declared = await r.engine.probe(structs.replace(r.server, logprob_kind="processed"))
        with pytest.raises(ModelError, match="does not serve 'other' but scripted"):
            await r.engine.probe(structs.replace(r.server, upstream_model="other"))
    assert (probe.trainable, probe.reason) == (True, "")
    assert (probe.engine, probe.version) == ("vllm 0.32.0+scripted", "0.32.0+scripted")
    assert (probe.max_context, probe.logprob_kind) == (77, "raw")
    assert declared.logprob_kind == "processed"


async def test_counting_is_exact(rig: Any) -> None:
    async with rig("vllm", {"content": "a"}, mode="capture") as r:
        counted = await r.engine.count(r.server, [USER], [{"type": "function"}])
        await r.all(messages=[USER], tools=[{"type": "function"}])
        assert counted == len(r.journal[0].prompt_token_ids)


async def probed(answer: Any, mode: str = "capture") -> Any:
    """The probe of a server whose stream is `answer` to a request body."""

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def reply(request: web.Request) -> web.StreamResponse:
        found = answer(await request.json())
        return found if isinstance(found, web.Response) else web.Response(text=found, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/{path:.*}", reply)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="vllm", model="m", mode=mode)  # type: ignore[arg-type]
        return await engines(client)["vllm"].probe(server)


def said(prompt: Any, ids: Any, logprobs: list[float], usage: tuple[int, int] | None = None) -> str:
    content = [{"logprob": value} for value in logprobs]
    choice = {"delta": {}, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
    counted = usage or (len(prompt or ()), len(ids or ()))
    last = {"choices": [], "usage": {"prompt_tokens": counted[0], "completion_tokens": counted[1]}}
    events = [{"choices": [choice], "prompt_token_ids": prompt}, last]
    return "".join(f"data: {web.json_response(event).text}\n\n" for event in events)


@pytest.mark.parametrize(
    ("answer", "reason", "kind"),
    [
        (said([1], [2, 3, 4], [-1.0, -2.0, -3.0]), "", "raw"),
        (said([1], [2, 3, 4], [-11.9, -11.901, -11.902]), "", "processed"),
        (said([1], [2], [-11.9]), "", "raw"),
        (said(None, None, []), "it returned no prompt ids, no sampled ids", "raw"),
        (said([1], [2, 3], []), "it returned 2 sampled ids but no logprobs", "raw"),
        (said([1], [2, 3], [-1.0]), "it returned 2 sampled ids but 1 logprobs", "raw"),
        (said([1], [2, 3], [-1.0, -2.0], (9, 2)), "it counted 9 and 2 tokens of prompt and reply, but", "raw"),
        (said([1], [-2], [-1.0]), "the server returned ids that are none", "raw"),
    ],
)
async def test_what_a_probe_finds(answer: str, reason: str, kind: str) -> None:
    probe = await probed(lambda body: answer)
    assert probe.trainable == (not reason)
    assert probe.reason.startswith(reason)
    assert probe.logprob_kind == kind


async def test_a_probe_is_milder_where_it_is_refused() -> None:
    def only_mild(body: dict[str, Any]) -> Any:
        return web.Response(status=400) if "logit_bias" in body else said([1], [2, 3, 4], [-5.0, -5.0, -5.0])

    probe = await probed(only_mild)
    assert (probe.trainable, probe.logprob_kind) == (True, "raw")
    refused = await probed(lambda body: web.Response(status=400))
    assert refused.trainable
    with pytest.raises(ModelError, match="503"):
        await probed(lambda body: web.Response(status=503))


async def test_a_probe_in_tokens_mode_compares_the_prompt() -> None:
    def another_prompt(body: dict[str, Any]) -> str:
        logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-1.0]}
        choice = {"text": "", "prompt_token_ids": [*body["prompt"], 9], "logprobs": logprobs, "finish_reason": "stop"}
        return f"data: {web.json_response({'choices': [choice]}).text}\n\n"

    probe = await probed(another_prompt, "tokens")
    assert probe.reason == "it was sent the prompt [1, 2, 3] and used [1, 2, 3, 9]"


async def test_a_server_of_another_kind() -> None:
    async with serve_app(web.Application()) as url, http_client() as client:
        with pytest.raises(ModelError, match="has no /v1/models"):
            await engines(client)["vllm"].probe(LlmServer(server_id="s", url=url, engine="vllm"))
