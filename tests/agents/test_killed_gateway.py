"""A gateway that is killed with -9 while Codex works, and started again at the same address."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from rig import SECRET, Rig
from scenes import FIRST, SECOND, Scene, say, shell, task, write_first

from rollyard.pipeline.config import Config, GatewayConfig, NatsConfig, StoreConfig, to_toml
from rollyard.pipeline.crash import VARIABLE
from rollyard.pipeline.embedded import free_port

pytestmark = [pytest.mark.agent("codex"), pytest.mark.asyncio(loop_scope="module")]

PATIENT = {"config": {"model_providers": {"gateway": {"stream_max_retries": 50}}}}
SLOW = [
    say("I write the first file.", write_first("codex")),
    say(
        "I look at it. " * 20,
        shell("codex", "cat first.txt"),
        shell("codex", "echo two > second.txt"),
        chunk_delay_s=0.05,
    ),
    say("Both files are there."),
]


class Mortal:
    """A gateway as a process at a fixed address."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        folder.mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        config = Config(
            nats=NatsConfig(url=rig.nats),
            store=StoreConfig(data=str(folder), blobs=str(rig.folder / "blobs")),
            gateway=GatewayConfig(port=self.port),
        )
        (folder / "config.toml").write_text(to_toml(config))
        (folder / "secret").write_bytes(SECRET)
        self.process: Process

    async def start(self, **env: str) -> None:
        """Start it, and wait until it serves."""
        command = ("-m", "rollyard", "gateway", "--config", str(self._folder / "config.toml"))
        with (self._folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=log, stderr=log, env=os.environ | env
            )
        async with aiohttp.ClientSession() as client:
            while True:
                assert self.process.returncode is None, (self._folder / "log").read_text()
                try:
                    async with client.get(f"{self.url}/readyz") as response:
                        # "ready; 1 of 1 model servers healthy": it finds them one by one.
                        words = (await response.text()).split()
                    if response.status == 200 and words[1] == words[3] != "0":
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)


@asynccontextmanager
async def mortal_gateway(rig: Rig, name: str, **env: str) -> AsyncIterator[Mortal]:
    gateway = Mortal(rig, rig.folder / f"{name}-gateway")
    await gateway.start(**env)
    try:
        yield gateway
    finally:
        gateway.process.kill()
        await gateway.process.wait()


async def test_codex_goes_on_when_the_gateway_dies_in_mid_stream(rig: Rig) -> None:
    scene = Scene(agent="codex", conversations=[{"match": "", "turns": SLOW}], tokens=True, options=PATIENT)
    await rig.model("mid-stream", scene)
    async with mortal_gateway(rig, "mid-stream") as gateway, asyncio.TaskGroup() as group:
        playing = group.create_task(rig.run("mid-stream", scene, url=gateway.url, lost=1))

        async def speaks() -> bool:
            return len(await rig.records("mid-stream")) == 2

        await rig.until(speaks, "the second reply has begun")
        await asyncio.sleep(1.0)  # it takes several times as long
        gateway.process.kill()
        await gateway.process.wait()
        await gateway.start()
        session = await playing
    assert session.done.exit_code == 0, session.table()
    assert (session.done.work / "first.txt").read_text() == FIRST
    assert (session.done.work / "second.txt").read_text() == SECOND
    session.assert_exact(unfinished=1)
    first, lost, *rest = session.records
    half = session.journal[lost.intent.call_id]
    assert lost.end is None and half.status == "aborted" and half.token_ids, session.table()
    assert len({record.intent.gateway for record in session.records}) == 2
    session.assert_chain([first, *rest])
    assert session.forest.excluded == {lost.intent.call_id: "lost"}
    assert session.forest.incomplete == (lost.intent.call_id,)
    assert len(session.chains()) == 1, session.table()


@pytest.mark.parametrize(("step", "lost"), [("gateway.before_end", 1), ("gateway.end_logged", 0)])
async def test_codex_goes_on_when_the_gateway_dies_around_the_end_of_a_call(rig: Rig, step: str, lost: int) -> None:
    scene = Scene(agent="codex", conversations=task("codex"), tokens=True, options=PATIENT)
    name = step.replace(".", "-")
    await rig.model(name, scene)
    mark = rig.folder / f"{name}-mark"
    async with mortal_gateway(rig, name, **{VARIABLE: f"{step}@{mark}"}) as gateway, asyncio.TaskGroup() as group:
        playing = group.create_task(rig.run(name, scene, url=gateway.url, lost=lost))
        await gateway.process.wait()
        assert mark.exists()
        await gateway.start()
        session = await playing
    assert session.done.exit_code == 0, session.table()
    assert (session.done.work / "second.txt").read_text() == SECOND
    session.assert_exact(unfinished=lost, dead=1 - lost)
    [chain] = session.chains()
    assert len(chain) == 3, session.table()
    session.assert_chain(chain)
    assert list(session.forest.excluded.values()) == ["lost" if lost else "dead"]
    assert [later for later, _ in session.links("retry")] == [] if lost else [chain[0]]
