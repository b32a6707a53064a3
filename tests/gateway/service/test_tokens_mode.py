"""Tokens mode: the gateway renders, sends ids and gets ids. In front of llama.cpp's protocol, then of llama.cpp."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from msgspec import structs

from rollyard.gateway.local_model import LocalModel
from rollyard.gateway.scripted_llm import serve_app
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.task import Sampling

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
USER: dict[str, Any] = {"role": "user", "content": "hello"}


class FakeLlama:
    """llama.cpp's /completion with replies that a test decides. `asked` are the bodies that came."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.replies: list[list[int]] = []
        self.stop_type = "eos"
        self.withheld = 0
        self.asked: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/completion", self.completion)
        return app

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, _request: web.Request) -> web.Response:
        meta = {"n_vocab": self.tokenizer.vocab_size, "n_ctx": 200}
        return web.json_response({"data": [{"id": "tiny", "meta": meta}]})

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        probe = request.headers["x-request-id"] == "probe"
        if not probe:
            self.asked.append(body)
        ids = [5] if probe else self.replies[len(self.asked) - 1]
        response = web.StreamResponse()
        await response.prepare(request)
        for number, token in enumerate(ids):
            text = self.tokenizer.decode(TokenIds.of([token]), True)
            sampled = {"id": token, "logprob": -0.5 * number}
            event = {"content": text, "tokens": [token], "completion_probabilities": [sampled]}
            await self.send(response, {**event, "tokens_predicted": number + 1 + self.withheld, "stop": False})
        await self.send(
            response,
            {
                "content": "",
                "tokens": [],
                "stop": True,
                "stop_type": self.stop_type,
                "tokens_predicted": len(ids) + self.withheld,
                "tokens_evaluated": len(body["prompt"]),
                "timings": {"cache_n": 1},
            },
        )
        return response

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


@pytest.fixture
async def llama(stage: Any, tokenizer: TextTokenizer, tokenizer_folder: Path) -> AsyncIterator[FakeLlama]:
    fake = FakeLlama(tokenizer)
    async with serve_app(fake.app()) as url:
        await stage.register(
            LlmServer(server_id="llama", url=url, engine="llamacpp", mode="tokens", tokenizer=str(tokenizer_folder))
        )
        yield fake


def sampled(tokenizer: TextTokenizer, *texts: str, end: bool = True) -> list[int]:
    """Ids of the texts, each encoded by itself, so that they are not what the whole text encodes to."""
    ids = [number for text in texts for number in tokenizer.encode_plain(text)]
    return [*ids, tokenizer.specials["<|im_end|>"]] if end else ids


async def test_the_next_prompt_is_the_last_one_and_what_was_sampled_and_a_suffix(
    stage: Any, llama: FakeLlama, renderer: Renderer
) -> None:
    tokenizer = renderer.tokenizer
    drifting = sampled(tokenizer, "Hav", "ing", " hel", "lo")
    assert TokenIds.of(drifting[:-1]) != tokenizer.encode_plain("Having hello")
    llama.replies = [drifting, sampled(tokenizer, "done")]
    gateway = await stage.gateway()
    _, body = await stage.ask(gateway, [USER])
    reply = body["choices"][0]["message"]
    assert reply["content"] == "Having hello"
    await stage.ask(gateway, [USER, reply, {"role": "user", "content": "<|im_end|>"}])

    first, second = (request["prompt"] for request in llama.asked)
    assert first == renderer.prompt([USER], None).tolist()
    assert second[: len(first) + len(drifting)] == first + drifting
    suffix = second[len(first) + len(drifting) :]
    assert (
        tokenizer.decode(TokenIds.of(suffix), False)
        == "\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert suffix.count(tokenizer.specials["<|im_end|>"]) == 1

    end, last = await stage.ends()
    assert end.completion_ids == TokenIds.of(drifting)
    assert (end.untrainable, end.usage.cached_tokens) == (None, 1)
    assert last.shared_prompt_ids == len(first) + len(drifting)
    assert last.prompt_ids == TokenIds.of(suffix)
    assert [intent.drift for intent in await stage.intents()] == [None, None]


async def test_a_reply_that_was_cut_is_closed_in_the_next_prompt(
    stage: Any, llama: FakeLlama, renderer: Renderer
) -> None:
    cut = sampled(renderer.tokenizer, "Having", end=False)
    llama.replies = [cut, sampled(renderer.tokenizer, "done")]
    llama.stop_type = "limit"
    gateway = await stage.gateway()
    _, body = await stage.ask(gateway, [USER])
    assert body["choices"][0]["finish_reason"] == "length"
    await stage.ask(gateway, [USER, body["choices"][0]["message"], USER])
    first, second = (request["prompt"] for request in llama.asked)
    assert second[: len(first) + len(cut) + 1] == [*first, *cut, renderer.tokenizer.specials["<|im_end|>"]]


async def test_changed_tools_start_a_new_prompt_and_say_so(stage: Any, llama: FakeLlama, renderer: Renderer) -> None:
    llama.replies = [sampled(renderer.tokenizer, "a"), sampled(renderer.tokenizer, "b")]
    gateway = await stage.gateway()
    _, body = await stage.ask(gateway, [USER])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await stage.ask(gateway, [USER, body["choices"][0]["message"], USER], tools=tools)
    first, second = await stage.intents()
    assert second.parent == first.call_id
    assert second.drift == "tools_changed"


async def test_ids_that_the_server_withholds_are_noticed(stage: Any, llama: FakeLlama, renderer: Renderer) -> None:
    llama.replies = [sampled(renderer.tokenizer, "hello"), sampled(renderer.tokenizer, "world")]
    llama.withheld = 2
    gateway = await stage.gateway()
    llama.asked.clear()
    _, body = await stage.ask(gateway, [USER])
    assert body["choices"][0]["message"]["content"] == "hello"
    await stage.ask(gateway, [USER, body["choices"][0]["message"], USER])
    end, _ = await stage.ends()
    assert "a character of several tokens" in end.untrainable
    assert end.completion_ids == TokenIds()
    assert [intent.drift for intent in await stage.intents()] == [None, "parent_ids_unknown"]


async def test_a_prompt_over_the_context(stage: Any, llama: FakeLlama) -> None:
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [{"role": "user", "content": "hello " * 300}])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["message"].startswith("This model's maximum context length is 200 tokens.")
    assert await stage.events() == []


async def test_a_reply_may_be_as_long_as_the_context_lasts(stage: Any, llama: FakeLlama, renderer: Renderer) -> None:
    llama.replies = [sampled(renderer.tokenizer, "a")] * 2
    gateway = await stage.gateway()
    await stage.ask(gateway, [USER], max_tokens=100_000)
    await stage.ask(gateway, [USER])
    room = 200 - len(renderer.prompt([USER], None))
    assert [request["n_predict"] for request in llama.asked] == [room, room]


async def test_content_that_is_not_text(stage: Any, llama: FakeLlama) -> None:
    gateway = await stage.gateway()
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    status, body = await stage.ask(gateway, [{"role": "user", "content": [image]}])
    assert (status, body["error"]["code"]) == (400, "invalid_messages")
    assert "capture mode" in body["error"]["message"]


async def test_vllm_takes_ids_too_and_a_whole_conversation_is_one_chain(stage: Any, tokenizer_folder: Path) -> None:
    """The scripted server samples ids that no tokenizer would choose: only ids that are kept make one chain."""
    command = {"name": "bash", "arguments": {"command": "ls -la"}}
    turns = [{"content": f"Having said hello {n} unbelievable", "tool_calls": [command]} for n in range(5)]
    await stage.model(*turns, tokenizer=str(tokenizer_folder))
    gateway = await stage.gateway()
    messages: list[dict[str, Any]] = [USER]
    for _ in turns:
        status, body = await stage.ask(gateway, messages, tools=TOOLS)
        assert status == 200, body
        reply = body["choices"][0]["message"]
        messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "a.txt"}]
    assert [intent.drift for intent in await stage.intents()] == [None] * 5
    whole = TokenIds()
    for end, given in zip(await stage.ends(), stage.journal(), strict=True):
        assert end.untrainable is None
        assert end.shared_prompt_ids == len(whole)
        whole += end.prompt_ids
        assert whole == TokenIds.of(given.prompt_token_ids)
        whole += end.completion_ids
        assert end.completion_ids == TokenIds.of(given.token_ids)


async def register(stage: Any, model: LocalModel) -> None:
    await stage.register(
        LlmServer(
            server_id="local",
            url=model.url,
            engine="llamacpp",
            mode="tokens",
            tokenizer=str(model.tokenizer),
            logprob_kind="raw",
        )
    )


@pytest.mark.model
async def test_llama_cpp_samples_what_is_logged(stage: Any, local_model: LocalModel) -> None:
    """The logged ids, given to llama.cpp directly with the same seed, are sampled again with the same logprobs."""
    await register(stage, local_model)
    gateway = await stage.gateway()
    key = stage.key(sampling=Sampling(temperature=1.0, seed=5, max_tokens=12))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count to five."}]
    for _ in range(3):
        status, body = await stage.ask(gateway, messages, key=key)
        assert status == 200, body
        messages += [body["choices"][0]["message"], {"role": "user", "content": "Go on <|im_end|>."}]

    intents, ends = await stage.intents(), await stage.ends()
    whole = 0
    for intent, end in zip(intents, ends, strict=True):
        assert (end.untrainable, intent.drift, end.logprob_kind) == (None, None, "raw")
        assert len(end.logprobs) == len(end.completion_ids) == end.usage.completion_tokens
        assert end.shared_prompt_ids == whole
        whole += len(end.prompt_ids) + len(end.completion_ids)

    # Only the first call: a prompt that is partly cached is computed in other batches, and gives other logits.
    end, params = ends[0], intents[0].params
    again = {
        **{name: params[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
        "prompt": end.prompt_ids.tolist(),
        "n_predict": len(end.completion_ids),
        "n_probs": 1,
        "return_tokens": True,
        "cache_prompt": False,
    }
    async with stage.client.post(f"{local_model.url}/completion", json=again) as response:
        answer = await response.json()
    assert answer["tokens"] == end.completion_ids.tolist()
    logprobs = [token["logprob"] for token in answer["completion_probabilities"]]
    assert np.allclose(logprobs, np.asarray(end.logprobs), atol=1e-4)


@pytest.mark.model
async def test_llama_cpp_stops_when_the_agent_leaves(stage: Any, local_model: LocalModel) -> None:
    await register(stage, local_model)
    gateway = await stage.gateway()
    async with stage.post(gateway, [USER], stream=True, max_tokens=1500) as response:
        assert response.status == 200
        await response.content.readany()
        response.close()
    [end] = await stage.until(stage.ends)
    assert end.status == "aborted"

    async def idle() -> bool:
        async with stage.client.get(f"{local_model.url}/slots") as response:
            return not any(slot["is_processing"] for slot in await response.json())

    await stage.until(idle)


@pytest.mark.model
async def test_a_llama_cpp_prompt_over_its_context(stage: Any, local_model: LocalModel) -> None:
    await register(stage, local_model)
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [{"role": "user", "content": "hello " * 5000}])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_parser_that_nobody_knows_is_found_at_registration(stage: Any, tokenizer_folder: Path) -> None:
    await stage.model({"content": "hello"}, tokenizer=str(tokenizer_folder))
    gateway = await stage.gateway()
    [entry] = gateway.gateway.pool.entries()
    assert entry.template.startswith("hermes; append-only")
    await stage.register(structs.replace(entry.server, server_id="s2", parser="no-such-family"))

    async def refused() -> bool:
        return any("there is no parser 'no-such-family'" in each.trouble for each in gateway.gateway.pool.entries())

    await stage.until(refused)
