"""Real gateways as processes behind a relay on a real bus, killed with -9 while agents are in the middle of a reply."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import images
import msgspec
import pytest
from relays import client
from scenes import FIRST, say, shell, write_first

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.gateway.relay.service import Relay, relay_service
from rollyard.gateway.scripted.journal import open_journal
from rollyard.gateway.scripted.script import Script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.harnesses.harness import AgentContext, open_harness
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.config import Config, GatewayConfig, NatsConfig, StoreConfig, to_toml
from rollyard.pipeline.embedded import EmbeddedNats, free_port
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.streams import Limits
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.rollout import Rollout
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task
from rollyard.stages.agent_install import agent_mounts, bundle_folder, python_program
from rollyard.stages.sandbox import Labels, Plan
from rollyard.stages.sandboxes import jail_setup
from rollyard.stages.sandboxes.bubblewrap import BubblewrapBackend
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID

SECRET = b"the secret of the gateways of this test"
LONG = "word after word. " * 30
SLOW_S = 0.05


class Fleet:
    """Gateways at fixed addresses, each a process that can be killed."""

    def __init__(self, nats: str, folder: Path, stack: AsyncExitStack) -> None:
        self.nats = nats
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self._stack = stack

    async def start(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._start(free_port()))

    async def _start(self, port: int) -> None:
        folder = self.folder / f"gateway-{port}"
        folder.mkdir()
        (folder / "secret").write_bytes(SECRET)
        config = Config(
            nats=NatsConfig(url=self.nats),
            store=StoreConfig(data=str(folder), blobs=str(self.folder / "blobs")),
            gateway=GatewayConfig(port=port),
        )
        (folder / "config.toml").write_text(to_toml(config))
        command = (sys.executable, "-m", "rollyard", "gateway", "--config", str(folder / "config.toml"))
        log = self._stack.enter_context((folder / "log").open("wb"))
        url = f"http://127.0.0.1:{port}"
        self.processes[url] = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        async with aiohttp.ClientSession() as http:
            while True:
                assert self.processes[url].returncode is None, (folder / "log").read_text()
                try:
                    async with http.get(f"{url}/readyz") as reply:
                        if reply.status == 200 and (await reply.text()).startswith("ready; 1 of 1"):
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def kill_serving(self, relay: Relay) -> str:
        """Kill the gateway that a connection of the relay leads to."""
        [url] = {each.url for each in relay.carrier.connections if each.url}
        self.processes[url].kill()
        await self.processes[url].wait()
        return url


@pytest.fixture
async def fleet(nats: EmbeddedNats, bus: Bus, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(nats.url, tmp_path, stack)
        yield fleet
        for process in fleet.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def model(bus: Bus, tokenizer: TextTokenizer, folder: Path, turns: list[Any]) -> AsyncIterator[None]:
    plan = {
        "conversations": [{"match": "Hi", "turns": [{"content": "hello"}]}, {"turns": turns}],
        "chat_template": "chatml_tools",
        "max_model_len": 400_000,
    }
    with open_journal(folder / "journal.jsonl") as journal:
        async with serve_app(build_app(msgspec.convert(plan, Script), tokenizer, journal)) as url:
            server = LlmServer(server_id="m", url=url, engine="vllm", upstream_model="scripted", policy_version=1)
            await Bucket(bus, subjects.LLM_SERVERS, LlmServer).put("m", server)
            yield


async def calls(bus: Bus) -> list[CallIntent | CallEnd]:
    read = bus.read(subjects.LOG, subjects.log_subject("run", "r1", "call"))
    return [decode(stored.data, CallEvent) async for stored in read]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(0.05)


def key() -> str:
    return sign(SessionGrant(run="run", rollout_id="r1", attempt=1), SECRET)


async def test_a_stream_breaks_with_its_gateway_and_the_next_request_goes_to_another(
    fleet: Fleet, bus: Bus, tokenizer: TextTokenizer, folder: Path
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "speak"}], "stream": True}
    headers = {"Authorization": f"Bearer {key()}"}
    turns = [{"content": LONG, "chunk_delay_s": SLOW_S}]
    async with model(bus, tokenizer, fleet.folder, turns), relay_service(folder, fleet.nats, Limits()) as relay:
        await fleet.start(2)
        async with client(folder) as http:
            async with http.post("/v1/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
                for _ in range(4):
                    await reply.content.readuntil(b"\n\n")
                killed = await fleet.kill_serving(relay)
                with pytest.raises(aiohttp.ClientError):
                    await reply.read()
            async with http.post("/v1/chat/completions", json=body, headers=headers) as reply:
                text = await reply.text()
                assert text.endswith("data: [DONE]\n\n")
        assert {each.url for each in relay.carrier.connections} <= set(fleet.processes) - {killed}
    logged = await calls(bus)
    assert len({event.gateway for event in logged if isinstance(event, CallIntent)}) == 2
    assert len([event for event in logged if isinstance(event, CallEnd)]) == 1


def tree() -> str:
    lack = images.missing()
    try:
        jail_setup.find_tools()
    except SandboxError as error:
        lack = lack or str(error)
    if lack:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lack)
    return str(images.root_tree(DEFAULT_UID if os.getuid() == 0 else None))


TURNS = {
    "ask": [say(LONG, chunk_delay_s=SLOW_S)],
    "codex": [
        say("I write the first file.", write_first("codex")),
        say(LONG, shell("codex", "cat first.txt > second.txt"), chunk_delay_s=SLOW_S),
        say("Both files are there."),
    ],
}
ARGS = {"codex": {"config": {"model_providers": {"gateway": {"stream_max_retries": 50}}}}}


@pytest.mark.parametrize("name", ["ask", pytest.param("codex", marks=pytest.mark.agent("codex"))])
async def test_an_agent_in_a_jail_goes_on_when_its_gateway_dies_in_mid_reply(
    fleet: Fleet, bus: Bus, tokenizer: TextTokenizer, folder: Path, name: str
) -> None:
    image = tree()
    settings = {"root": str(fleet.folder / "sandboxes"), "images": str(fleet.folder / "images"), "relay": str(folder)}
    labels = Labels(run="run", rollout_id="r1", attempt=1, owner="test", created_ms=1)
    agent = AgentSpec(harness=name, args=ARGS.get(name, {}))
    prompt = "Write two files, one in each turn."
    task = Task(id="t", prompt=prompt, agent=agent, evaluation=EvaluationSpec(rule="none"))
    async with (
        model(bus, tokenizer, fleet.folder, TURNS[name]),
        relay_service(folder, fleet.nats, Limits()) as relay,
        BubblewrapBackend.from_settings(settings) as backend,
    ):
        await fleet.start(2)
        mounts = agent_mounts(agent, backend.capabilities)
        sandbox = await backend.create(labels, Plan(image=image, network="gateway", mounts=mounts))
        try:
            assert sandbox.gateway_url == "http://127.0.0.1:8400"
            context = AgentContext(
                rollout=Rollout.of("run", "t", 0, 1),
                attempt=1,
                task=task,
                base_url=f"{sandbox.gateway_url}/v1",
                api_key=key(),
                home=sandbox.home,
                workdir=sandbox.workdir,
                python=python_program(agent, backend.capabilities),
                bundle=bundle_folder(agent, backend.capabilities),
            )
            harness = open_harness(name)
            await sandbox.put_files(harness.files(context), base="home")
            await sandbox.start("agent", harness.command(context), deadline_s=100.0)
            # The slow reply is the last but one of Codex, and the only one of the other.
            slow = 2 if name == "codex" else 1
            while sum(isinstance(event, CallIntent) for event in await calls(bus)) < slow:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            await fleet.kill_serving(relay)
            end = await sandbox.wait("agent")
            stdout, stderr = await sandbox.output("agent", 100_000)
            assert end.exit_code == 0, (stdout[-2000:], stderr[-2000:])
            if name == "codex":
                assert await sandbox.read_file("second.txt", 1000) == FIRST.encode()
            else:
                assert stdout.decode().strip() == LONG.strip()
        finally:
            await sandbox.destroy()
    logged = await calls(bus)
    assert len({event.gateway for event in logged if isinstance(event, CallIntent)}) == 2
