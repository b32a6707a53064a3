from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollyard.pipeline.supervisor import ChildSpec, Supervisor, answers_tcp, claim_port, first_error
from rollyard.schemas.errors import SetupError

SLEEP = "import time; time.sleep(600)"
TELL_AND_END = """
import signal, sys, time
def end(*_):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def says(log: Path, text: str) -> Callable[[], object]:
    async def probe() -> bool:
        return log.exists() and text in log.read_text()

    return probe


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - it looks at another process
            await asyncio.sleep(0.02)


async def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    changes: list[None] = []
    async with Supervisor.running(tmp_path, lambda: changes.append(None)) as supervisor:
        child = await supervisor.start(ChildSpec(name="one", command=python(SLEEP), stop_rank=0))
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.restarts == 1 and child.pid is not None)
        second = child.pid
        assert second is not None
        assert second != first
        assert len(changes) >= 3
    assert not alive(second)
    assert child.pid is None


async def test_children_stop_in_order_of_rank(tmp_path: Path) -> None:
    told = tmp_path / "told"
    async with Supervisor.running(tmp_path) as supervisor:
        for name, rank in (("nats", 2), ("worker", 0), ("gateway", 1)):
            log = tmp_path / f"{name}.log"
            command = python(TELL_AND_END, str(told), name)
            await supervisor.start(ChildSpec(name=name, command=command, stop_rank=rank, ready=says(log, "ready")))
    assert told.read_text().split() == ["worker", "gateway", "nats"]


async def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    async with Supervisor.running(tmp_path) as supervisor:
        ready = says(tmp_path / "deaf.log", "ready")
        child = await supervisor.start(
            ChildSpec(name="deaf", command=python(DEAF), stop_rank=0, stop_s=0.2, ready=ready)
        )
    assert child.process is not None
    assert child.process.returncode == -signal.SIGKILL


async def test_a_child_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    command = python("import sys; print('the dog ate it'); sys.exit(7)")
    with pytest.raises(SetupError) as caught:
        async with Supervisor.running(tmp_path) as supervisor:
            await supervisor.start(
                ChildSpec(name="bad", command=command, stop_rank=0, ready=answers_tcp("127.0.0.1", 1))
            )
    assert "bad ended with exit code 7 while it started; it said last: the dog ate it" in str(caught.value)
    assert str(tmp_path / "bad.log") in caught.value.hint


async def test_a_child_that_is_not_ready_in_time(tmp_path: Path) -> None:
    spec = ChildSpec(
        name="slow", command=python(SLEEP), stop_rank=0, ready=answers_tcp("127.0.0.1", 1), ready_s=0.1, stop_s=5
    )
    with pytest.raises(SetupError, match=r"slow was not ready after 0.1 s"):
        async with Supervisor.running(tmp_path) as supervisor:
            await supervisor.start(spec)
    pid = supervisor.children["slow"].process
    assert pid is not None
    assert pid.returncode is not None


async def test_an_exit_code_that_no_restart_mends_ends_everything(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="hopeless ended with exit code 3; it said last: no secret"):
        async with Supervisor.running(tmp_path) as supervisor:
            other = await supervisor.start(ChildSpec(name="other", command=python(SLEEP), stop_rank=0))
            hopeless = python("import sys; print('no secret'); sys.exit(3)")
            await supervisor.start(ChildSpec(name="hopeless", command=hopeless, stop_rank=0))
            await asyncio.Event().wait()
    assert other.pid is None


SUPERVISE = """
import asyncio, sys
from pathlib import Path
from rollyard.pipeline.supervisor import ChildSpec, Supervisor
async def main():
    async with Supervisor.running(Path(sys.argv[1])) as supervisor:
        spec = ChildSpec(name="child", command=[sys.executable, "-c", sys.argv[2]], stop_rank=0, stop_s=600)
        child = await supervisor.start(spec)
        while "ready" not in child.log_file.read_text():
            await asyncio.sleep(0.02)
        print(child.pid, flush=True)
        await asyncio.Event().wait()
try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("stopped", flush=True)
"""


def supervise(folder: Path, program: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(python(SUPERVISE, str(folder), program), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    process, child = supervise(tmp_path, DEAF)
    with process:
        assert alive(child)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while alive(child):
            assert time.monotonic() < deadline, f"child {child} outlived its supervisor"
            time.sleep(0.02)


def test_the_first_ctrl_c_stops_and_the_second_kills(tmp_path: Path) -> None:
    process, child = supervise(tmp_path, DEAF)
    with process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        assert alive(child)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert said == "stopped\n"
    assert not alive(child)


def test_a_busy_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError) as caught:
            claim_port("127.0.0.1", port, "--nats-port")
    assert str(port) in caught.value.message
    assert "--nats-port" in caught.value.hint
    assert claim_port("127.0.0.1", 0, "--nats-port") > 0


def test_the_first_of_our_own_errors_is_shown() -> None:
    ours = SetupError("ours")
    group = BaseExceptionGroup("", [asyncio.CancelledError(), ExceptionGroup("", [ValueError("a"), ours])])
    assert first_error(group) is ours
    assert isinstance(first_error(BaseExceptionGroup("", [asyncio.CancelledError(), KeyError("k")])), KeyError)
