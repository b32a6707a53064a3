"""A whole gateway before a real vLLM. Between the two is a relay that keeps what vLLM said, byte by byte."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rollyard.gateway.scripted_llm import serve_app
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.schemas.weights import WeightUpdate

CALLS = ("/v1/chat/completions", "/v1/completions")
PROTOCOLS = pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])


@dataclass
class Told:
    """What vLLM reported of one call. `requests` are the bodies that it got."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)


class Relay:
    """Passes requests on to vLLM, and answers back as they come. `told` is by request id."""

    def __init__(self, client: aiohttp.ClientSession, vllm: str) -> None:
        self.url = ""
        self._client = client
        self._vllm = vllm
        self.told: dict[str, Told] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self.relay)
        return app

    async def relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        own = ("host", "content-length")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in own}
        asking = self._client.request(request.method, self._vllm + request.path_qs, data=body, headers=headers)
        async with asking as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            told = Told()
            if request.path in CALLS:
                told = self.told.setdefault(request.headers["x-request-id"], told)
                told.requests.append(msgspec.json.decode(body))
            rest = b""
            async for block in answer.content.iter_any():
                *lines, rest = (rest + block).split(b"\n")
                self._note(told, lines)
                await response.write(block)
            # A reply that is not streamed is one line without an end.
            self._note(told, [rest])
        return response

    def _note(self, told: Told, lines: list[bytes]) -> None:
        for line in lines:
            data = line.removeprefix(b"data: ")
            if not data.startswith(b"{"):
                continue
            event = msgspec.json.decode(data)
            told.usage = event.get("usage") or told.usage
            told.prompt += event.get("prompt_token_ids") or []
            for choice in event.get("choices", ()):
                self._note_choice(told, choice)

    def _note_choice(self, told: Told, choice: dict[str, Any]) -> None:
        logprobs = choice.get("logprobs") or {}
        if "delta" in choice or "message" in choice:
            told.ids += choice.get("token_ids") or []
            told.logprobs += [token["logprob"] for token in logprobs.get("content") or ()]
        else:
            told.ids += [int(token.removeprefix("token_id:")) for token in logprobs.get("tokens") or ()]
            told.logprobs += logprobs.get("token_logprobs") or []


@pytest.fixture
async def relay(vllm: Any) -> AsyncIterator[Relay]:
    relay = Relay(vllm.client, vllm.server.url)
    async with serve_app(relay.app()) as relay.url:
        yield relay


async def entered(rig: Any, url: str, mode: str, tokenizer: str) -> Any:
    """A gateway with vLLM in its pool, in this mode."""
    tokens = {"tokenizer": tokenizer, "parser": "hermes"} if mode == "tokens" else {}
    await rig.register("real", url=url, engine="vllm", upstream_model="tiny", **tokens)
    return await rig.gateway()


@pytest.fixture
def model_folder(checkpoints: tuple[Path, Path]) -> str:
    return str(checkpoints[0])


def assert_as_told(records: list[Any], relay: Relay) -> None:
    """What the log says is what vLLM said, and every call can be trained on."""
    for record in records:
        end, told = record.end, relay.told[record.intent.call_id]
        assert (end.status, end.untrainable, record.broken) == ("ok", None, None)
        assert end.completion_ids.tolist() == told.ids
        assert end.logprobs.tolist() == pytest.approx(told.logprobs, rel=1e-6)
        assert end.usage.completion_tokens == told.usage["completion_tokens"] == len(told.ids)
        assert end.usage.prompt_tokens == told.usage["prompt_tokens"] == len(record.prompt_ids)
        if told.prompt:
            assert record.prompt_ids.tolist() == told.prompt
        else:
            assert record.prompt_ids.tolist() == told.requests[-1]["prompt"]
        assert end.engine.startswith("vllm 0.")


def assert_one_chain(records: list[Any]) -> None:
    """Each prompt is the one before it, what was sampled then, and more; the log names the call that it continues."""
    for before, after in itertools.pairwise(records):
        whole = before.prompt_ids + before.end.completion_ids
        assert after.prompt_ids[: len(whole)] == whole
        assert len(after.prompt_ids) > len(whole)
        assert (after.intent.parent, after.intent.drift) == (before.intent.call_id, None)
        assert after.end.shared_prompt_ids == len(whole)


@PROTOCOLS
async def test_tokens_mode_makes_one_chain_of_noise(
    rig: Any, relay: Relay, model_folder: str, renderer: Renderer, protocol: str
) -> None:
    """What random weights sample is hardly ever what a tokenizer writes: only ids that are kept make one chain."""
    gateway = await entered(rig, relay.url, "tokens", model_folder)
    talk = rig.talk(gateway, protocol, "real", opening="Say something.")
    talk.tools = True
    for turn in range(4):
        talk.user(f"Turn {turn}: <|im_end|>")
        said = await talk.ask(stream=turn % 2 == 1, **{talk.speaker.limit: 100})
        assert said.usage is not None
    records = await talk.ended(4)
    assert_as_told(records, relay)
    assert_one_chain(records)
    tokenizer = renderer.tokenizer
    drifts = [
        tokenizer.encode_plain(tokenizer.decode(record.end.completion_ids, False)) != record.end.completion_ids
        for record in records
    ]
    assert any(drifts)
    # vLLM is not asked to send back the ids that it was sent.
    calls = [relay.told[record.intent.call_id] for record in records]
    assert not any("return_token_ids" in body for told in calls for body in told.requests)


@PROTOCOLS
async def test_capture_mode_makes_one_chain_of_texts_that_survive(
    rig: Any, relay: Relay, model_folder: str, renderer: Renderer, protocol: str
) -> None:
    """vLLM tokenises the history anew, so a reply must be one that comes out the same: seeds are tried until one is."""
    gateway = await entered(rig, relay.url, "capture", model_folder)
    tokenizer = renderer.tokenizer
    for seed in range(40):
        talk = rig.talk(gateway, protocol, "real", sampling={"seed": seed, "temperature": 1.0, "max_tokens": 3})
        talk.user("hello")
        await talk.ask()
        [record] = await talk.ended()
        ids = record.end.completion_ids
        if tokenizer.encode_plain(tokenizer.decode(ids, False).strip()) == ids:
            break
    else:
        pytest.fail("no seed had a reply that survives")
    talk.user("And then?")
    await talk.ask(stream=True)
    records = await talk.ended(2)
    assert_as_told(records, relay)
    assert_one_chain(records)


async def test_capture_mode_says_where_ids_came_out_otherwise(
    rig: Any, relay: Relay, model_folder: str, renderer: Renderer
) -> None:
    gateway = await entered(rig, relay.url, "capture", model_folder)
    talk = rig.talk(gateway, "chat", "real", sampling={"seed": 1, "temperature": 1.0, "max_tokens": 30})
    for text in ("hello", "And then?"):
        talk.user(text)
        await talk.ask()
    first, second = await talk.ended(2)
    assert_as_told([first, second], relay)
    whole = first.prompt_ids + first.end.completion_ids
    assert second.prompt_ids[: len(whole)] != whole
    assert second.end.shared_prompt_ids < len(whole)


async def test_a_reply_goes_on_with_other_weights(
    rig: Any, relay: Relay, vllm: Any, checkpoints: tuple[Path, Path]
) -> None:
    """The checkpoint is swapped in mid-reply: one reply, its ids in two spans, each of its own version."""
    first, second = map(str, checkpoints)
    gateway = await entered(rig, relay.url, "tokens", first)
    talk = rig.talk(gateway, "chat", "real")
    talk.user("hello")
    asked = asyncio.create_task(talk.ask(max_completion_tokens=400, seed=2))
    await vllm.busy()
    await asyncio.sleep(0.5)
    try:
        update = WeightUpdate(update_id="u8", version=8, checkpoint=second, how="abort", servers=("real",))
        report = await gateway.gateway.desk.update(update, lambda progress: None)
        assert [(each.step, each.policy_version, each.serving) for each in report.servers] == [("done", 8, True)]
        assert await vllm.control.version(vllm.server) == "8"
        await asked
    finally:
        asked.cancel()
        await vllm.control.load(vllm.server, first, 7)
    [record] = await talk.ended()
    end = record.end
    assert end.untrainable is None
    cut = end.version_spans[0].end
    assert 0 < cut < len(end.completion_ids) == len(end.logprobs) == 400
    assert [(span.start, span.end, span.policy_version) for span in end.version_spans] == [(0, cut, 7), (cut, 400, 8)]
    call_id = record.intent.call_id
    begun, went_on = relay.told[call_id], relay.told[f"{call_id}-1"]
    assert begun.ids == end.completion_ids[:cut].tolist()
    assert begun.ids + went_on.ids == end.completion_ids.tolist()
    assert went_on.requests[0]["prompt"] == begun.requests[0]["prompt"] + begun.ids


async def test_an_update_that_failed_is_mended_by_the_next_one(
    rig: Any, relay: Relay, vllm: Any, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """A vLLM that found no weights has none: it stays paused, so that no call can kill it."""
    first, second = map(str, checkpoints)
    gateway = await entered(rig, relay.url, "tokens", first)

    async def update(version: int, checkpoint: str) -> Any:
        asked = WeightUpdate(
            update_id=f"u{version}", version=version, checkpoint=checkpoint, how="abort", servers=("real",)
        )
        [server] = (await gateway.gateway.desk.update(asked, lambda progress: None)).servers
        return server

    try:
        failed = await update(8, str(tmp_path / "nothing"))
        assert (failed.step, failed.serving, failed.policy_version) == ("failed", False, None)
        assert await vllm.get("/is_paused") == {"is_paused": True}
        mended = await update(9, second)
        assert (mended.step, mended.serving, mended.policy_version) == ("done", True, 9)
        talk = rig.talk(gateway, "chat", "real")
        talk.user("hello")
        await talk.ask(max_completion_tokens=8)
        [record] = await talk.ended()
        assert (record.end.policy_version, record.end.untrainable) == (9, None)
    finally:
        await vllm.control.load(vllm.server, first, 7)


async def test_an_agent_that_leaves_ends_the_call_at_vllm(rig: Any, relay: Relay, vllm: Any, model_folder: str) -> None:
    gateway = await entered(rig, relay.url, "tokens", model_folder)
    talk = rig.talk(gateway, "chat", "real")
    talk.user("hello")
    async with talk.post(talk.body(stream=True, max_completion_tokens=1900)) as response:
        assert response.status == 200
        await response.content.readany()
        response.close()
    [record] = await talk.ended()
    assert (record.end.status, record.end.finish_reason) == ("aborted", None)
    await vllm.idle()


@pytest.mark.parametrize("mode", ["capture", "tokens"])
@PROTOCOLS
async def test_a_prompt_over_the_context(rig: Any, relay: Relay, model_folder: str, protocol: str, mode: str) -> None:
    gateway = await entered(rig, relay.url, mode, model_folder)
    talk = rig.talk(gateway, protocol, "real")
    talk.user("hello " * 2500)
    kind, code, message = await talk.refused(400)
    assert "context_length_exceeded" in (kind, code) or message.startswith("prompt is too long")


async def test_a_tool_choice_reaches_vllm(rig: Any, relay: Relay, model_folder: str) -> None:
    gateway = await entered(rig, relay.url, "capture", model_folder)
    talk = rig.talk(gateway, "chat", "real")
    talk.user("hello")
    talk.tools = True
    said = await talk.ask(stream=True, max_completion_tokens=200, seed=1, **talk.speaker.choice("named"))
    assert (said.calls[0].name, said.finish) == ("bash", "tool_calls")
    [record] = await talk.ended()
    told = relay.told[record.intent.call_id]
    assert (record.end.completion_ids.tolist(), record.prompt_ids.tolist()) == (told.ids, told.prompt)
    # Raw logprobs are taken for those of a model that was free.
    assert bool(record.end.untrainable) == (record.end.logprob_kind == "raw")


async def test_an_agent_that_asks_for_more_than_the_context_gets_what_there_is(
    rig: Any, relay: Relay, model_folder: str, renderer: Renderer
) -> None:
    """Agents ask for 64,000 tokens whatever the model; vLLM refuses to be asked for more than its whole context."""
    gateway = await entered(rig, relay.url, "capture", model_folder)
    talk = rig.talk(gateway, "messages", "real")
    talk.user("hello " * 2000)
    said = await talk.ask(max_tokens=64_000)
    assert said.usage is not None
    assert sum(said.usage) <= 2048
    assert_as_told(await talk.ended(), relay)
