"""One installation for tests of whole runs: `rollyard up` with a scripted policy, real processes throughout.

And a rig for tests of agents at a gateway, in which the scenes of a module are played side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agent_tools
import pytest
import pytest_asyncio
from rig import Rig, Session, make_tokenizer, open_rig
from scenes import Scene

from rollyard.gateway.scripted.journal import Entry, read_journal

LIMIT_S = 1800
"""For a test and what is played before it, on a machine that has much else to do."""
START_S = 300
SIDE_BY_SIDE = 3
"""Scenes at a time: agents take long to start, and the cores are few."""
STOP_S = 300


def bash(content: str, command: str) -> dict[str, Any]:
    """A turn in which the policy calls the tool of mini-swe-agent."""
    return {"content": content, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}


SCRIPT: dict[str, Any] = {
    "chat_template": "chatml_tools",
    # The server renders each prompt anew: only ids that its tokenizer would choose make one chain.
    "noncanonical": False,
    "conversations": [
        {
            "match": "Make answer.txt",
            "turns": [
                bash("I look first.", "ls -a && cat 'seed.txt'"),
                bash("", "tr a-z A-Z <seed.txt >answer.txt"),
                bash("That is it.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat answer.txt"),
            ],
        },
        {"match": "2 + 3", "turns": [{"content": "It is 5."}]},
        {"match": "capital of France", "turns": [{"content": "It is Lyon."}]},
    ],
}


@dataclass(frozen=True)
class Installation:
    """A running `rollyard up`. `folder` is for the files of tests; `data` is the data folder."""

    folder: Path
    data: Path

    @property
    def nats(self) -> str:
        """Address of its nats-server."""
        return str(json.loads((self.data / "state.json").read_text())["nats"])

    @property
    def journal(self) -> dict[str, Entry]:
        """What the model server has sampled, by call id."""
        return {entry.request_id: entry for entry in read_journal(self.folder / "journal.jsonl")}

    def rollyard(self, *arguments: str) -> str:
        """Run a command against it; returns what it printed. It must succeed."""
        command = [sys.executable, "-m", "rollyard", *arguments, "--data", str(self.data)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """`rollyard up`, from its start to its clean end."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    tokenizer = make_tokenizer(folder / "tokenizer")
    data = folder / "data"
    command = [sys.executable, "-m", "rollyard", "up", "--data", str(data), "--nats-port", "0", "--gateway-port", "0"]
    command += ["--scripted", "script.json", "--tokenizer", str(tokenizer), "--journal", "journal.jsonl"]
    said = folder / "up.out"
    with said.open("w") as output:
        up = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=dict(os.environ))
    try:
        deadline = time.monotonic() + START_S
        while "is up" not in said.read_text():
            assert up.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        yield Installation(folder, data)
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(STOP_S) == 0, said.read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A gateway for the tests of a module."""
    async with open_rig(tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions(request: pytest.FixtureRequest, rig: Rig) -> Mapping[str, Session]:
    """What came of the module's SCENES, as far as tests that were selected want them."""
    scenes: dict[str, Scene] = request.module.SCENES
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    wanted = {marker.args[0] for item in items for marker in item.iter_markers("scene")}
    found: dict[str, Session] = {}
    room = asyncio.Semaphore(SIDE_BY_SIDE)

    async def play(name: str, scene: Scene) -> None:
        await rig.model(name, scene)
        async with room:
            found[name] = await rig.run(name, scene)

    async with asyncio.TaskGroup() as group:
        for name, scene in scenes.items():
            if name in wanted and not agent_tools.missing(scene.agent):
                group.create_task(play(name, scene))
    return found


@pytest.fixture
def session(request: pytest.FixtureRequest, sessions: Mapping[str, Session]) -> Session:
    """What came of the scene that the test's marker names."""
    marker = request.node.get_closest_marker("scene")
    assert marker is not None
    return sessions[marker.args[0]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a scene needs the scene's agent. The first one of a module waits for all that are played."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
        marker = item.get_closest_marker("scene")
        if marker is not None:
            item.add_marker(pytest.mark.agent(item.module.SCENES[marker.args[0]].agent))  # type: ignore[attr-defined]
