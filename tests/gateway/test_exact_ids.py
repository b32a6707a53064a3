"""Ids sent = ids recorded = ids that the server saw, over random sessions, through every protocol and kind of server.

The truth is what stands at the server: the journal of the scripted one, the wire before a real llama.cpp.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from gateway_rig import Rig, Talk, open_rig, until
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollyard.gateway.local_model import LocalModel
from rollyard.gateway.scripted import chatml
from rollyard.gateway.service import RunningGateway
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.call import CallRecord
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.sample import Commit, Timings
from rollyard.schemas.task import Sampling
from rollyard.stages.calls import full_ids
from rollyard.stages.stitchers.v1 import build_samples, stitch

MODELS = ("vllm-capture", "vllm-tokens", "sglang-capture", "sglang-tokens")
PROTOCOLS = ("chat", "responses", "messages")
BASH = {"name": "bash", "arguments": {"command": "{prompt}"}}
# What the model says is made of what it was told, in turns: by the first word of a conversation.
KINDS: dict[str, list[dict[str, Any]]] = {
    "#text": [{"content": "{prompt}"}, {"content": "again {last}"}],
    "#tools": [{"content": "{prompt}", "tool_calls": [BASH]}, {"tool_calls": [BASH, BASH]}, {"content": "so: {last}"}]
    * 3,
    "#thought": [
        {"reasoning": "hm {prompt}", "content": "{last}", "tool_calls": [BASH]},
        {"reasoning": "x", "content": "y"},
    ]
    * 3,
}

# Making a failing session smaller would take longer than a test may.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

# --- random sessions ---

SHARP = (
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<tool_call>",
    "</think>",
    "<think>",
    "\n\n",
    "    return",
    "\u00e4\U0001f600",
    "{}",
)
WORDS = st.lists(st.one_of(st.sampled_from(SHARP), st.text(max_size=6)), max_size=5).map("".join)
STEPS = st.one_of(
    st.tuples(st.just("say"), WORDS, st.booleans()),
    st.tuples(st.just("say"), WORDS, st.booleans()),
    st.tuples(st.just("again"), WORDS, st.booleans()),
    st.tuples(st.just("fork"), WORDS, st.booleans()),
    st.tuples(st.just("sub_agents"), WORDS, st.booleans()),
)
SESSIONS = st.tuples(st.sampled_from(sorted(KINDS)), st.lists(STEPS, min_size=2, max_size=5))


class Agent:
    """Takes steps in a session; `calls` counts the requests that it made."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.calls = 0
        self._open: Any = None
        self._forks: list[int] = [0]

    async def step(self, what: str, words: str, stream: bool) -> None:
        talk = self.talk
        if what == "fork" and talk.history:
            # Back to how the conversation stood before one of its turns.
            del talk.history[self._forks[len(words) % len(self._forks)] :]
            self._open = None
        if self._open:
            talk.answer(self._open.calls, *(f"{words} {n}" for n, _ in enumerate(self._open.calls)))
        else:
            self._forks = [n for n in self._forks if n <= len(talk.history)] or [0]
            self._forks.append(len(talk.history))
            talk.user(words)
        if what == "again":
            await self._asked(talk.repeat(stream=not stream))
        if what == "sub_agents":
            async with asyncio.TaskGroup() as group:
                for name in ("one", "two"):
                    group.create_task(self._sub_agent(name, words, stream))
        said = await self._asked(talk.ask(stream=stream))
        self._open = said if said.calls else None

    async def _sub_agent(self, name: str, words: str, stream: bool) -> None:
        headers = {"thread-id": name, "x-codex-parent-thread-id": "main"}
        other = Agent(replace(self.talk, history=[], headers=headers))
        for _ in range(2):
            await other.step("say", f"{name} {words}", stream)
        self.calls += other.calls

    async def _asked(self, asking: Any) -> Any:
        self.calls += 1
        return await asking


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, tokenizer_folder: Path
) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(chatml.TEMPLATE)
    conversations = [{"match": kind, "turns": turns} for kind, turns in KINDS.items()]
    async with open_rig(tmp_path_factory.mktemp("rig"), tokenizer) as rig:
        for name in MODELS:
            flavour, _, mode = name.partition("-")
            await rig.scripted(name, conversations, flavour=flavour, tokenizer=folder if mode == "tokens" else None)
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(rig: Rig) -> list[RunningGateway]:
    """Two, and the calls of a session go now to this one, now to that one."""
    return [await rig.gateway(), await rig.gateway()]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=6, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(session=SESSIONS)
async def test_random_sessions(
    rig: Rig, gateways: list[RunningGateway], protocol: str, model: str, session: tuple[str, list[Any]]
) -> None:
    kind, steps = session
    agent = Agent(rig.talk(gateways[0], protocol, model, kind))
    agent.talk.tools = kind != "#text"
    for number, step in enumerate(steps):
        agent.talk.gateway = gateways[number % 2]
        await agent.step(*step)
    records = await agent.talk.records()
    assert len(records) == agent.calls
    check_ids(rig, model, records)
    check_chains(records, by_ids=model.endswith("-tokens"))
    check_samples(rig, model, records)


def check_ids(rig: Rig, model: str, records: list[CallRecord]) -> None:
    """What was sent, what was recorded and what the server saw and sampled are the same ids."""
    journal = rig.journal(model)
    for record in records:
        assert record.end is not None and (record.end.status, record.end.untrainable) == ("ok", None)
        [entry] = journal[record.intent.call_id]
        assert record.prompt_ids == TokenIds.of(entry.prompt_token_ids)
        assert record.end.completion_ids == TokenIds.of(entry.token_ids)
        assert np.array_equal(np.asarray(record.end.logprobs), np.asarray(entry.logprobs, dtype="<f4"))
        [asked] = rig.asked[record.intent.call_id]
        if model.endswith("-tokens"):
            sent = asked["prompt"] if "prompt" in asked else asked["input_ids"]
            assert record.prompt_ids == TokenIds.of(sent)


def check_chains(records: list[CallRecord], *, by_ids: bool) -> None:
    """A call that continues another one without drift starts with its ids."""
    known = {record.intent.call_id: record for record in records}
    for record in records:
        if record.intent.parent is not None:
            parent = known[record.intent.parent]
            assert record.intent.drift is None
            assert not by_ids or record.prompt_ids.data.startswith(full_ids(parent))
        assert record.broken is None


def check_samples(rig: Rig, model: str, records: list[CallRecord]) -> None:
    """Each sampled id is trained once, in the order of the journal's logprobs, unless the agent never had the reply."""
    stitched = stitch(records)
    assert {each.reason for each in stitched.excluded} <= {"dead"}
    dead = {each.call_id for each in stitched.excluded}
    prompts = [record.prompt_ids for record in records]
    assert all(prompts.count(each.prompt_ids) > 1 for each in records if each.intent.call_id in dead)
    journal = rig.journal(model)
    living = [journal[each.intent.call_id][0] for each in records if each.intent.call_id not in dead]
    commit = Commit(
        **{"run": "run", "task_id": "t", "group_id": "g", "rollout_id": "r"},
        **{"index": 0, "group_size": 1, "attempt": 1, "status": "completed", "cut_seq": 1},
    )
    samples = build_samples(stitched, commit, None, Timings())
    trained: list[tuple[int, float]] = []
    for sample in samples:
        mask = np.asarray(sample.loss_mask).astype(bool)
        assert len(mask) == len(sample.token_ids) == len(sample.logprobs)
        trained += zip(
            np.asarray(sample.token_ids)[mask].tolist(), np.asarray(sample.logprobs)[mask].tolist(), strict=True
        )
    sampled = [
        pair
        for entry in living
        for pair in zip(entry.token_ids, np.asarray(entry.logprobs, "<f4").tolist(), strict=True)
    ]
    assert len(trained) == sum(len(entry.token_ids) for entry in living)
    assert sorted(trained) == sorted(sampled)


# --- ids that no tokenizer would choose, and a real llama.cpp ---


class Wire:
    """Stands before llama.cpp and writes down what goes by; without one it answers itself, with `replies` in turn."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.replies: list[list[int]] = []
        self.sent: dict[str, list[int]] = {}
        self.sampled: dict[str, list[int]] = {}
        self.evaluated: dict[str, int] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on if self.url else self._answer)
        return app

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        call_id = request.headers.get("x-request-id", "")
        body, answer = await request.read(), b""
        async with (
            aiohttp.ClientSession() as client,
            client.request(request.method, self.url + request.path_qs, data=body) as upstream,
        ):
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(request)
            async for block in upstream.content.iter_any():
                answer += block
                await response.write(block)
        if request.path == "/completion" and upstream.status == 200:
            self._note(call_id, msgspec.json.decode(body)["prompt"], answer)
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/completion":
            return web.json_response({"data": [{"meta": {"n_ctx": 4096}}]})
        call_id, prompt = request.headers["x-request-id"], (await request.json())["prompt"]
        ids = [5] if call_id == "probe" else self.replies[len(self.sent)]
        events: list[dict[str, Any]] = [
            {"tokens": [token], "completion_probabilities": [{"id": token, "logprob": -0.5}], "tokens_predicted": count}
            for count, token in enumerate(ids, 1)
        ]
        events.append({"stop": True, "stop_type": "eos", "tokens_predicted": len(ids), "tokens_evaluated": len(prompt)})
        answer = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        if call_id != "probe":
            self._note(call_id, prompt, answer)
        return web.Response(body=answer, content_type="text/event-stream")

    def _note(self, call_id: str, prompt: list[int], answer: bytes) -> None:
        events = [msgspec.json.decode(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        self.sent[call_id] = prompt
        self.sampled[call_id] = [token for event in events for token in event.get("tokens", ())]
        self.evaluated[call_id] = events[-1]["tokens_evaluated"]


def check_wire(wire: Wire, records: list[CallRecord]) -> None:
    for before, record in zip([None, *records], records, strict=False):
        call_id, end = record.intent.call_id, record.end
        assert end is not None and end.status == "ok"
        assert record.prompt_ids.tolist() == wire.sent[call_id]
        assert wire.evaluated[call_id] == len(record.prompt_ids)
        if end.untrainable is None:
            assert end.completion_ids.tolist() == wire.sampled[call_id]
        else:
            # llama.cpp does not tell every id of a character that several make up: nothing is guessed.
            assert "a character of several tokens" in end.untrainable
            assert not end.completion_ids
        if before is not None and before.end is not None and before.end.untrainable is None:
            assert record.intent.drift is None
            assert record.prompt_ids.data.startswith(full_ids(before))
        elif before is not None:
            assert record.intent.drift == "parent_ids_unknown"


# Ids that decode to a text which is encoded as other ids.
DRIFTING = {
    "Having": [56, 565, 274],
    "hello": [2797, 5365],
    "HAVING": [56, 12052, 4728],
    " unbelievable": [551, 23282, 102, 515],
    "\n\n": [198, 198],
    "    return": [289, 5406],
    "Having\n\nhello    return": [56, 565, 274, 198, 198, 2797, 5365, 289, 5406],
}


@pytest.mark.model
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_ids_that_drift_when_encoded_again_stay_as_they_were_sampled(
    tmp_path: Path, model_path: Path, model_tokenizer: TextTokenizer, protocol: str
) -> None:
    wire, end = Wire(), model_tokenizer.specials["<|im_end|>"]
    async with open_rig(tmp_path, model_tokenizer) as rig:
        await rig.serve(wire.app(), "llama", engine="llamacpp", tokenizer=str(model_path))
        gateway = await rig.gateway()
        for text, ids in DRIFTING.items():
            assert model_tokenizer.decode(TokenIds.of(ids), False) == text
            assert model_tokenizer.encode_plain(text).tolist() != ids
            if protocol == "messages" and not text.strip():
                continue  # an agent of this protocol never has a blank text: its API refuses to get one back
            wire.replies += [[*ids, end]] * 3
            talk = rig.talk(gateway, protocol, "llama")
            for stream in (False, True, False):
                talk.user("go on")
                assert (await talk.ask(stream=stream)).text == text
            records = await talk.records()
            check_wire(wire, records)
            assert [record.intent.drift for record in records] == [None] * 3, text
            first, last = (record.prompt_ids.tolist() for record in (records[0], records[2]))
            assert last.count(end) == first.count(end) + 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama(rig: Rig, gateways: list[RunningGateway], local_model: LocalModel) -> Wire:
    """A real llama.cpp behind a wire that is watched."""
    wire = Wire(local_model.url)
    await rig.serve(wire.app(), "llama", engine="llamacpp", tokenizer=str(local_model.tokenizer))

    async def healthy() -> bool:
        pools = [gateway.gateway.pool for gateway in gateways]
        return all(any(each.server.server_id == "llama" and each.healthy for each in pool.entries()) for pool in pools)

    await until(healthy)
    return wire


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=2, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(texts=st.lists(WORDS, min_size=3, max_size=3), seed=st.integers(0, 1000))
async def test_random_sessions_on_llama_cpp(
    rig: Rig, gateways: list[RunningGateway], llama: Wire, texts: list[str], seed: int
) -> None:
    for protocol in PROTOCOLS:
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=6)
        talk = rig.talk(gateways[0], protocol, "llama", "say:", sampling=sampling)
        for number, text in enumerate(texts):
            talk.gateway = gateways[number % 2]
            talk.user(text)
            await talk.ask(stream=bool(number % 2))
        check_wire(llama, await talk.records())
