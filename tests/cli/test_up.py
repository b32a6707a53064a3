"""`rollyard up` with real processes: what it starts, restarts, refuses and stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import LlmServer

pytestmark = pytest.mark.model  # the scripted policy uses its tokenizer

ROLES = {"nats", "model", "gateway", "controller", "sink", "admit", "init", "run", "eval", "aggregate"}
PORTS = ("--nats-port", "0", "--gateway-port", "0")


class Up:
    """A running `rollyard up`."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        script = folder / "script.json"
        script.write_text('{"conversations": [{"turns": [{"content": "The answer is 4."}]}]}')
        self.arguments = ["up", "--data", str(self.data), "--scripted", str(script), *PORTS]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        said = self.data.parent / "said"
        with said.open("w") as output:
            process = subprocess.Popen([sys.executable, "-m", "rollyard", *self.arguments], stdout=output, cwd="/")
        until(lambda: "is up" in said.read_text() or process.poll() is not None)
        assert process.poll() is None
        return process

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.data / "state.json").read_text())
        return state

    def again(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollyard", *self.arguments, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def listens(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"))
    yield running
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(60)


def test_one_process_for_each_role(up: Up) -> None:
    assert set(up.state["children"]) == ROLES
    assert all(map(alive, up.state["children"].values()))
    assert up.state["pid"] == up.process.pid
    with urllib.request.urlopen(up.state["gateway"] + "/healthz") as reply:
        assert reply.status == 200


async def test_the_model_server_is_in_the_pool(up: Up) -> None:
    async with Bus.connect(up.state["nats"], name="test") as bus:
        pool = [server async for _, server, _ in Bucket[LlmServer](bus, subjects.LLM_SERVERS, LlmServer).items()]
    assert [(server.url, server.engine, server.upstream_model) for server in pool] == [
        (up.state["model"], "vllm", "scripted")
    ]


def test_commands_find_it_by_its_data_folder(up: Up) -> None:
    command = [sys.executable, "-m", "rollyard", "status", "--data", str(up.data)]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_second_one_on_the_folder_is_refused(up: Up) -> None:
    done = up.again()
    assert done.returncode == 3
    assert f"another rollyard (pid {up.process.pid}) runs on {up.data}" in done.stderr
    assert f"`kill {up.process.pid}`" in done.stderr


def test_a_busy_port_is_refused(up: Up, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = up.again("--data", str(tmp_path / "other"), "--gateway-port", str(port))
    assert done.returncode == 3
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in done.stderr
    assert "--gateway-port" in done.stderr


def test_without_a_model_server_nothing_is_left_behind(tmp_path: Path) -> None:
    arguments = ["up", "--data", str(tmp_path / "data"), *PORTS, "--llm", "http://127.0.0.1:1"]
    done = subprocess.run([sys.executable, "-m", "rollyard", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "no model server answers at http://127.0.0.1:1" in done.stderr
    assert "start it first, or leave --llm out" in done.stderr
    children = json.loads((tmp_path / "data/state.json").read_text())["children"]
    assert children == {"nats": None}


@pytest.mark.parametrize("name", ["gateway", "nats", "run"])
def test_a_child_that_is_killed_comes_back_on_its_port(up: Up, name: str) -> None:
    before = up.state
    os.kill(before["children"][name], signal.SIGKILL)
    until(lambda: up.state["children"][name] not in (before["children"][name], None))
    assert (up.state["nats"], up.state["gateway"]) == (before["nats"], before["gateway"])
    address = before["gateway"] if name == "gateway" else before["nats"]
    host, _, port = address.rpartition("/")[2].partition(":")
    until(lambda: listens(host, int(port)))


def test_it_keeps_everything_in_its_folder_and_stops_cleanly(up: Up) -> None:
    children = up.state["children"]
    secret = (up.data / "secret").read_text()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not any(map(alive, children.values()))
    assert set(up.state["children"].values()) == {None}
    held = {path.name for path in up.data.iterdir()}
    assert {"nats", "samples", "logs", "secret", "version", "config.toml", "state.json"} <= held
    assert {path.stem for path in (up.data / "logs").iterdir()} == ROLES

    up.process = up.start()
    assert (up.data / "secret").read_text() == secret
