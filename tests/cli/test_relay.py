"""The relay of `rollyard up`, and what `rollyard doctor` says of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollyard.gateway.relay.control import Request, ask
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes import jail_setup


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def doctor(*arguments: str, backends: str) -> dict[str, str]:
    env = os.environ | {"ROLLYARD__WORKER__BACKENDS": backends}
    command = [sys.executable, "-m", "rollyard", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    [found] = [finding for finding in json.loads(done.stdout) if finding["check"] == "relay"]
    return dict(found)


def test_doctor_says_whether_one_is_needed_and_answers(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    assert doctor(*data, backends="local,none")["status"] == "ok"
    missing = doctor(*data, backends="local,bubblewrap")
    assert missing["status"] == "warn"
    assert "rollyard relay" in missing["mend"]


@pytest.mark.model  # the scripted policy uses its tokenizer
@pytest.mark.slow
def test_up_keeps_a_relay_running_where_a_backend_needs_one(tmp_path: Path) -> None:
    try:
        jail_setup.find_tools()
    except SandboxError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    (tmp_path / "script.json").write_text('{"conversations": [{"turns": [{"content": "4"}]}]}')
    data, said = tmp_path / "data", tmp_path / "said"
    command = ["up", "--data", str(data), "--scripted", str(tmp_path / "script.json")]
    env = os.environ | {"ROLLYARD__WORKER__BACKENDS": "local,bubblewrap"}
    with said.open("w") as output:
        up = subprocess.Popen(
            [sys.executable, "-m", "rollyard", *command, "--nats-port", "0", "--gateway-port", "0"],
            stdout=output,
            stderr=output,
            env=env,
        )
    try:
        until(lambda: "is up" in said.read_text() or up.poll() is not None)
        assert up.poll() is None, said.read_text()
        answer = until(lambda: (found := ask(data / "relay", Request(do="hello"))).gateways and found)
        state = json.loads((data / "state.json").read_text())
        assert answer.gateways == (state["gateway"],)
        os.kill(state["children"]["relay"], signal.SIGKILL)

        def another() -> bool:
            try:
                return ask(data / "relay", Request(do="hello")).incarnation != answer.incarnation
            except SandboxError:
                return False

        until(another)
        assert doctor("--config", str(data / "config.toml"), backends="bubblewrap")["status"] == "ok"
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(90) in (0, 130)
    assert not (data / "relay/control.sock").exists(), "it ended in order"
