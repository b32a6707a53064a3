"""A gateway on a real bus before scripted model servers, and what the log says about each agent that ran through it."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import subprocess
import time
import typing
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import agents
import msgspec
from scenes import Scene
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.gateway.scripted import chatml
from rollyard.gateway.scripted.journal import Entry, open_journal, read_journal
from rollyard.gateway.scripted.script import Script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.service import RunningGateway, gateway_service
from rollyard.gateway.settings import GatewaySettings
from rollyard.gateway.tokens.tokenizer import load_tokenizer
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import nats_server
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.log import read_rollout
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent, CallRecord
from rollyard.schemas.errors import BusAway
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.sample import Commit, Sample
from rollyard.stages.calls import resolve
from rollyard.stages.stitchers.forest import Forest, grow
from rollyard.stages.stitching import STITCHER_VERSION, outcome_of

RUN = "agents"
SECRET = b"a secret of the tests"
Answer = TypeVar("Answer")
SETTLE_S = 180
"""How long servers may take to be found, and calls to be logged."""


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE that knows English and code a little, so that long prompts are not too many ids, with ChatML."""
    folder.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train([inspect.getfile(module) for module in (argparse, subprocess, typing)], trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": chatml.TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """What `ask` gives; again while the bus gives no answer, as on a machine that has too much to do."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            return await ask()
        except BusAway:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(1.0)


@dataclass(kw_only=True)
class Session:
    """What the log and the model server know of one run of an agent."""

    events: list[tuple[int, CallEvent]]
    records: list[CallRecord]
    journal: dict[str, Entry]
    done: agents.Done

    @cached_property
    def forest(self) -> Forest:
        return grow(self.events)

    def drift(self) -> dict[str, int]:
        """How many breaks there are, by reason."""
        return dict(Counter(each.reason for each in self.forest.drift))

    def links(self, kind: str) -> list[tuple[CallRecord, CallRecord]]:
        """The later and the earlier call of the links of a kind."""
        by_id = {record.intent.call_id: record for record in self.records}
        return [(by_id[link.call_id], by_id[link.to]) for link in self.forest.links if link.kind == kind]

    def samples(self) -> tuple[Sample, ...]:
        """What would be trained of it, were every scenario trained."""
        policy = SamplePolicy(scenarios=("main", "sub_agent", "compaction", "summary", "title", "heartbeat"))
        first = self.records[0].intent
        commit = Commit(
            run=first.run,
            task_id="task",
            group_id="task",
            group_size=1,
            rollout_id=first.rollout_id,
            index=0,
            attempt=1,
            status="completed",
            cut_seq=max(seq for seq, _ in self.events),
            stitcher=STITCHER_VERSION,
            policy=policy,
        )
        return outcome_of(self.events, commit).samples

    def chains(self) -> list[list[CallRecord]]:
        """The branches."""
        by_id = {record.intent.call_id: record for record in self.records}
        return [[by_id[call_id] for call_id in branch] for branch in self.forest.branches]

    def calls(self, *scenarios: str) -> list[CallRecord]:
        """The calls of these scenarios."""
        return [record for record in self.records if record.intent.scenario in scenarios]

    def assert_exact(self, *, unfinished: int = 0, dead: int = 0) -> None:
        """Every call is in the log with what the model server sampled, and each sampled id is trained once.

        Left out are `unfinished` calls, which came to no good end, and `dead` ones, whose reply the agent never had.
        """
        ended = {record.intent.call_id: record for record in self.records if record.end and record.end.status == "ok"}
        assert len(self.records) - len(ended) == unfinished, self.table()
        assert ended.keys() <= self.journal.keys() <= {record.intent.call_id for record in self.records}
        for call_id, record in ended.items():
            entry, end = self.journal[call_id], record.end
            assert entry.status == "ok" and end is not None and record.broken is None, self.table()
            assert (end.untrainable, end.error, end.http_status) == (None, None, 200), self.table()
            assert record.prompt_ids.tolist() == entry.prompt_token_ids
            assert end.completion_ids.tolist() == entry.token_ids
            assert end.logprobs.tolist() == entry.logprobs
            assert end.usage.prompt_tokens == len(entry.prompt_token_ids)
            assert end.usage.completion_tokens == len(entry.token_ids)
        trained: dict[str, list[int]] = {}
        for sample in self.samples():
            for turn in sample.turns:
                if turn.trained:
                    assert turn.call_id not in trained, self.table()
                    assert set(sample.loss_mask[turn.start : turn.end]) == {1}
                    trained[turn.call_id] = sample.token_ids[turn.start : turn.end].tolist()
        for call_id, ids in trained.items():
            assert ids == self.journal[call_id].token_ids
        left_out = {call_id for call_id, reason in self.forest.excluded.items() if reason == "dead"}
        assert len(left_out) == dead, self.table()
        assert sorted(trained) == sorted(ended.keys() - left_out), self.table()

    def assert_chain(self, chain: list[CallRecord]) -> None:
        """These calls are one trajectory, in which each one names the one before it as its parent."""
        assert chain in self.chains(), self.table()
        parents = [None, *(record.intent.call_id for record in chain[:-1])]
        assert [record.intent.parent for record in chain] == parents, self.table()
        assert {record.intent.drift for record in chain} == {None}, self.table()

    def table(self) -> str:
        """The calls, one a line, for the message of an assertion."""
        names = {record.intent.call_id: number for number, record in enumerate(self.records)}
        lines = [
            f"{number} parent={names.get(record.intent.parent or '')} {record.intent.scenario} "
            f"stream={record.intent.stream} messages={record.intent.shared_messages}+{len(record.intent.messages)} "
            f"drift={record.intent.drift} {record.end and (record.end.status, record.end.http_status)} "
            f"usage={record.end and record.end.usage} untrainable={record.end and record.end.untrainable} "
            f"error={record.end and record.end.error} broken={record.broken}"
            for number, record in enumerate(self.records)
        ]
        return "\n".join(
            [
                *lines,
                *map(str, self.forest.drift),
                *map(str, self.forest.links),
                str(self.forest.excluded),
                self.done.told(),
            ]
        )


class Rig:
    """Shared by the tests of a module. Each agent has a session, a model and folders of its own."""

    def __init__(self, nats: str, bus: Bus, gateway: RunningGateway, folder: Path, stack: AsyncExitStack) -> None:
        self.nats = nats
        self.bus = bus
        self.gateway = gateway
        self.folder = folder
        self.tokenizer_folder = make_tokenizer(folder / "tokenizer")
        self._tokenizer = load_tokenizer(self.tokenizer_folder)
        self._stack = stack

    async def model(self, name: str, scene: Scene) -> None:
        """Serve the model of a scene. In capture mode it samples what its tokenizer would choose:

        each prompt is rendered anew there. In tokens mode it samples other ids too, as models do.
        """
        plan: dict[str, Any] = {"chat_template": "chatml_tools", "noncanonical": scene.tokens, "max_model_len": 400_000}
        plan |= scene.script | {"conversations": scene.conversations}
        journal = self._stack.enter_context(open_journal(self.folder / f"{name}.jsonl"))
        app = build_app(msgspec.convert(plan, Script), self._tokenizer, journal)
        url = await self._stack.enter_async_context(serve_app(app))
        server = LlmServer(
            server_id=name,
            url=url,
            engine="vllm",
            model=name,
            upstream_model="scripted",
            policy_version=1,
            mode="tokens" if scene.tokens else "capture",
            tokenizer=str(self.tokenizer_folder) if scene.tokens else "",
        )
        servers: Bucket[LlmServer] = Bucket(self.bus, subjects.LLM_SERVERS, LlmServer)
        await patiently(lambda: servers.put(name, server))
        await self.until(lambda: self._is_served(name), f"model server {name} is healthy")

    async def _is_served(self, name: str) -> bool:
        return any(entry.server.server_id == name and entry.healthy for entry in self.gateway.gateway.pool.entries())

    async def until(self, condition: Callable[[], Awaitable[object]], what: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + SETTLE_S
        while not await condition():
            troubles = {entry.server.server_id: entry.trouble for entry in self.gateway.gateway.pool.entries()}
            assert time.monotonic() < deadline, f"not within {SETTLE_S} s: {what}; {troubles}"
            await asyncio.sleep(0.05)

    def key(self, name: str) -> str:
        """The session key of rollout `name`, which is served by the model of that name."""
        return sign(SessionGrant(run=RUN, rollout_id=name, attempt=1, model=name), SECRET)

    async def run(self, name: str, scene: Scene, *, url: str = "", lost: int = 0) -> Session:
        """Play a scene as rollout `name`, at this gateway or another one. `lost` calls have no end in the log."""
        job = agents.Job(
            url=url or self.gateway.url,
            key=self.key(name),
            prompt=scene.prompt,
            home=self.folder / name / "home",
            work=self.folder / name / "work",
            options=scene.options,
        )
        job.home.mkdir(parents=True)
        job.work.mkdir()
        done = await agents.run(scene.agent, job)
        await self.until(lambda: self._is_logged(name, lost), f"every call of {name} but {lost} has its end")
        journal = {entry.request_id: entry for entry in read_journal(self.folder / f"{name}.jsonl")}
        journal.pop("probe", None)
        events = await self._events(name)
        return Session(events=events, records=resolve(events), journal=journal, done=done)

    async def _is_logged(self, name: str, lost: int) -> bool:
        return sum(record.end is None for record in await self.records(name)) <= lost

    async def records(self, name: str) -> list[CallRecord]:
        """The calls of rollout `name`, as far as they are logged."""
        return resolve(await self._events(name))

    async def _events(self, name: str) -> list[tuple[int, CallEvent]]:
        events = await patiently(lambda: read_rollout(self.bus, RUN, name, kinds=("call",)))
        return [(seq, event) for seq, event in events if isinstance(event, CallIntent | CallEnd)]


@asynccontextmanager
async def open_rig(folder: Path) -> AsyncIterator[Rig]:
    """A rig for the time of the block."""
    async with (
        nats_server(folder / "nats") as nats,
        Bus.connect(nats.url, name="tests", blobs=BlobStore(folder / "blobs")) as bus,
        AsyncExitStack() as stack,
    ):
        await ensure(bus)
        gateway = await stack.enter_async_context(gateway_service(bus, GatewaySettings(secret=SECRET, drain_s=1.0)))
        yield Rig(nats.url, bus, gateway, folder, stack)
