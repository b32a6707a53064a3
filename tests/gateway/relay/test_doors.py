"""Doors into real network namespaces, with relays as real processes: as this user, as root with a jail of another user,
and as an unprivileged user."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from relays import named, needs, relay_to, web_server

from rollyard.gateway.relay.control import Request, ask
from rollyard.gateway.relay.folder import keep
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.door import GATEWAY_PORT, Doors, check_relay, close_door, open_door

UNPRIVILEGED = ("setpriv", "--reuid=60001", "--regid=60001", "--clear-groups")
FETCH = """
import socket, sys
try:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as s:
        s.sendall(b"GET /inside HTTP/1.0\\r\\n\\r\\n")
        print(b"".join(iter(lambda: s.recv(65536), b"")).decode())
except OSError as error:
    print(type(error).__name__)
"""
LISTEN = """
import socket, sys, time
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
time.sleep(600)
"""
RELAY = """
import asyncio, sys
from pathlib import Path
from rollyard.gateway.relay.service import fixed_relay
async def main():
    async with fixed_relay(Path(sys.argv[1]), sys.argv[2:]):
        print("ready", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
OPEN = """
import asyncio, sys
from pathlib import Path
from rollyard.stages.sandboxes.door import open_door
asyncio.run(open_door(Path(sys.argv[1]), int(sys.argv[2]), "box"))
"""


@pytest.fixture(autouse=True)
def tools() -> None:
    needs("unshare", "nsenter", "setpriv")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user reaches, too."""
    path = Path(tempfile.mkdtemp(prefix="relay-"))
    path.chmod(0o755)
    if os.getuid() == 0:
        os.chown(path, 60001, 60001)
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def running(*command: str, ready: bool = True) -> AsyncIterator[Process]:
    """A process that says when it is ready; killed at the end."""
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)
    assert process.stdout is not None
    try:
        if ready:
            while (line := await process.stdout.readline()) != b"ready\n":
                assert line, "it ended"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def network(user: Sequence[str] = ()) -> AsyncIterator[int]:
    """The holder of a network of its own, with nothing in it."""
    command = (*user, "unshare", "-Urn", "sh", "-c", "echo ready; exec sleep 600")
    async with running(*command) as process:
        yield process.pid


async def fetch(holder: int, port: int = GATEWAY_PORT) -> str:
    """What a client in that network gets of the port."""
    enter = ("nsenter", "-t", str(holder), "-U", "-n", "--preserve-credentials")
    command = (*enter, sys.executable, "-I", "-S", "-c", FETCH, str(port))
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)
    output, _ = await process.communicate()
    return output.decode()


@asynccontextmanager
async def relay_process(folder: Path, url: str) -> AsyncIterator[Process]:
    """`rollyard relay` without a bus, that knows one gateway from before; entered when it answers."""
    folder.mkdir(exist_ok=True)
    keep(folder / "gateways.json", [url])
    config = folder / "config.toml"
    config.write_text(f'[nats]\nurl = "nats://127.0.0.1:1"\n[relay]\nfolder = "{folder}"\n')
    command = (sys.executable, "-m", "rollyard", "relay", "--config", str(config))
    async with running(*command, ready=False) as process:
        while True:
            try:
                ask(folder, Request(do="hello"))
                break
            except SandboxError:
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield process


@pytest.mark.parametrize("jail", [(), UNPRIVILEGED], ids=["ours", "of another user"])
async def test_a_door_leads_to_the_gateway_and_nowhere_else(folder: Path, jail: Sequence[str]) -> None:
    if jail and os.getuid():
        pytest.skip("only root makes jails of other users")
    async with web_server(named("a")) as url, relay_to(folder, url), network(jail) as holder:
        await open_door(folder, holder, "box")
        assert '"by": "a", "path": "/inside"' in await fetch(holder)
        assert await fetch(holder, int(url.rpartition(":")[2])) == "ConnectionRefusedError\n"


async def test_relay_worker_and_jail_of_an_unprivileged_user(open_folder: Path) -> None:
    if os.getuid():
        pytest.skip("this user is unprivileged: all other tests show it")
    folder, python = open_folder / "relay", await python_for_others()
    async with (
        web_server(named("a")) as url,
        network(UNPRIVILEGED) as holder,
        running(*UNPRIVILEGED, *python, "-c", RELAY, str(folder), url),
    ):
        opening = await asyncio.create_subprocess_exec(*UNPRIVILEGED, *python, "-c", OPEN, str(folder), str(holder))
        assert await opening.wait() == 0
        assert '"by": "a", "path": "/inside"' in await fetch(holder)


async def python_for_others() -> tuple[str, ...]:
    """A Python that any user may start, with what ours can import."""
    version = f"python3.{sys.version_info.minor}"
    for candidate in (str(Path(sys.executable).resolve()), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = ("env", f"PYTHONPATH={':'.join(filter(None, sys.path))}", candidate)
        # From a shell, since setpriv itself still may all that root may when it starts a program.
        probe = await asyncio.create_subprocess_exec(
            *UNPRIVILEGED, "sh", "-c", '"$@"', "sh", *command, "-c", "import rollyard.gateway.relay.service"
        )
        if await probe.wait() == 0:
            return command
    pytest.skip("no Python here is for all users")


async def test_doors_of_a_killed_relay_are_opened_by_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "relay"
    async with web_server(named("a")) as url, network() as first, network() as second:
        async with relay_process(folder, url) as relay:
            await open_door(folder, first, "first")
            await open_door(folder, second, "second")
            os.kill(relay.pid, signal.SIGKILL)
            await relay.wait()
        async with relay_process(folder, url):
            while ask(folder, Request(do="hello")).doors < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert '"by": "a"' in await fetch(first)
            assert '"by": "a"' in await fetch(second)


async def test_a_relay_that_knows_nothing_is_told_of_the_doors(tmp_path: Path) -> None:
    folder, doors = tmp_path / "relay", Doors(tmp_path / "relay")
    async with web_server(named("a")) as url, network() as one, network() as two:
        holders = {"one": one, "two": two}
        async with relay_to(folder, url):
            first = await check_relay(folder)
            await doors.open(one, "one")
            await doors.renew(holders)
        (folder / "doors.json").unlink()
        async with relay_to(folder, url) as relay:
            assert await check_relay(folder) != first
            assert await fetch(one) == "ConnectionRefusedError\n"
            await doors.renew(holders)
            assert len(relay.doors) == 2
            assert '"by": "a"' in await fetch(one)
            await doors.renew(holders)
            assert len(relay.doors) == 2


async def test_a_door_closes_when_its_sandbox_is_gone(folder: Path) -> None:
    async with relay_to(folder) as relay:
        async with network() as holder:
            await open_door(folder, holder, "gone")
            assert len(relay.doors) == 1
        while len(relay.doors):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        answer = await asyncio.to_thread(ask, folder, Request(do="missing", keys=("gone",)))
        assert answer.missing == ("gone",)


async def test_a_door_that_is_closed_lets_nobody_through_and_can_be_opened_again(folder: Path) -> None:
    async with web_server(named("a")) as url, relay_to(folder, url), network() as holder:
        await open_door(folder, holder, "box")
        await open_door(folder, holder, "box")
        assert '"by": "a"' in await fetch(holder)
        await close_door(folder, "box")
        await close_door(folder, "box")
        assert await fetch(holder) == "ConnectionRefusedError\n"
        await open_door(folder, holder, "box")
        assert '"by": "a"' in await fetch(holder)


async def test_two_that_open_a_door_at_a_time_both_succeed(folder: Path) -> None:
    async with web_server(named("a")) as url, relay_to(folder, url) as relay, network() as holder:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(open_door(folder, holder, "box"))
        assert len(relay.doors) == 1
        assert '"by": "a"' in await fetch(holder)


async def test_our_own_network_gets_no_door(folder: Path) -> None:
    async with relay_to(folder) as relay:
        with pytest.raises(SandboxError) as caught:
            await open_door(folder, os.getpid(), "box")
        assert "has no network of its own" in caught.value.message
        assert len(relay.doors) == 0


async def test_a_port_that_is_taken_inside_is_named(folder: Path) -> None:
    async with relay_to(folder), network() as holder:
        enter = ("nsenter", "-t", str(holder), "-U", "-n", "--preserve-credentials")
        up = await asyncio.create_subprocess_exec(*enter, "ip", "link", "set", "lo", "up")
        assert await up.wait() == 0
        async with running(*enter, sys.executable, "-I", "-S", "-c", LISTEN, str(GATEWAY_PORT)):
            with pytest.raises(SandboxError) as caught:
                await open_door(folder, holder, "box")
            assert f"127.0.0.1:{GATEWAY_PORT}" in caught.value.message


async def test_a_holder_that_is_gone_is_an_error(folder: Path) -> None:
    async with network() as holder:
        pass
    async with relay_to(folder):
        with pytest.raises(SandboxError) as caught:
            await open_door(folder, holder, "box")
        assert str(holder) in caught.value.message


async def test_without_a_relay_the_error_says_how_to_get_one(folder: Path) -> None:
    async with network() as holder:
        for call in (open_door(folder, holder, "box"), Doors(folder).renew({"box": holder})):
            with pytest.raises(SandboxError) as caught:
                await call
            assert "rollyard relay" in caught.value.hint
        await close_door(folder, "box")


async def test_a_door_is_not_opened_for_a_key_that_is_no_name(folder: Path) -> None:
    async with relay_to(folder) as relay, network() as holder:
        with pytest.raises(SandboxError):
            await open_door(folder, holder, "../box")
        assert len(relay.doors) == 0
