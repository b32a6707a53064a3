"""The backend `e2b` through the real SDK, against the protocol server of these tests, whose sandboxes are jails."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from e2b import E2B
from e2b_server import running
from e2b_server.running import KEY, KEY_ENV, RunningServer

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import Labels, Plan, open_backend
from rollyard.stages.sandboxes import e2b as e2b_backend
from rollyard.stages.sandboxes import e2b_clients, e2b_stream
from rollyard.stages.sandboxes.e2b import E2bBackend
from rollyard.stages.sandboxes.e2b_sandbox import E2bSandbox

ALONE = Plan(network="none")


def pytest_needs() -> None:
    if missing := running.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)


def labels(rollout: str = "ro1", **changes: Any) -> Labels:
    given: dict[str, Any] = {"run": "r", "rollout_id": rollout, "attempt": 1, "owner": "w", "created_ms": 5} | changes
    return Labels(**given)


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    pytest_needs()
    async with RunningServer.started() as started:
        yield started


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    monkeypatch.setattr(e2b_clients, "FIRST_PAUSE_S", 0.05)


@pytest.fixture
async def backend(server: RunningServer, tmp_path: Path) -> AsyncIterator[E2bBackend]:
    async with opened(server, tmp_path) as made:
        yield made


def opened(server: RunningServer, root: Path, **settings: Any) -> E2bBackend:
    made = open_backend("e2b", server.settings(root, **settings))
    assert isinstance(made, E2bBackend)
    return made


async def test_a_sandbox_from_its_making_to_its_end(backend: E2bBackend, server: RunningServer, tmp_path: Path) -> None:
    made = labels(role="eval", owner='w "1" é')
    sandbox = await backend.create(made, ALONE)
    assert (sandbox.home, sandbox.workdir, sandbox.gateway_url) == ("/home/user", "/home/user/work", None)
    assert await backend.list_owned() == [(sandbox.ref, made)]

    async with opened(server, tmp_path) as other:
        again = await other.open(sandbox.ref)
        assert (await again.exec("pwd; id -un", timeout_s=10)).stdout == b"/home/user/work\nuser\n"
    async with opened(server, tmp_path, installation="other") as stranger:
        assert await stranger.list_owned() == []
        with pytest.raises(SandboxError, match="installation"):
            await stranger.open(sandbox.ref)

    assert (await sandbox.stats()).memory_bytes
    await sandbox.destroy()
    await sandbox.destroy()
    assert await backend.list_owned() == []
    with pytest.raises(SandboxError, match="is gone"):
        await sandbox.exec("true", timeout_s=10)
    with pytest.raises(SandboxError, match="is gone"):
        await (await backend.open(sandbox.ref)).read_file("x", 10)


async def test_files_go_in_and_come_out_as_they_are(backend: E2bBackend) -> None:
    sandbox = await backend.create(labels(), ALONE)
    content = bytes(range(256)) * 3
    await sandbox.put_files({"a/b.bin": content, "ü.txt": "é"})
    await sandbox.put_files({".rc": "x"}, base="home")
    assert await sandbox.read_file("a/b.bin", 1 << 20) == content
    assert await sandbox.read_file("a/b.bin", 3) == b"\x00\x01\x02"
    assert await sandbox.read_file("/home/user/.rc", 10) == b"x"
    assert await sandbox.read_file("nothing", 10) is None
    with pytest.raises(SandboxError, match=r"\.\./x"):
        await sandbox.put_files({"../x": "x"})

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("big")
        member.size = 3_000_000
        archive.addfile(member, io.BytesIO(os.urandom(member.size)))
    await sandbox.put_tree(packed.getvalue(), "tree")
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_tree("tree"))) as archive:
        assert [(entry.name, entry.size) for entry in archive if entry.isfile()] == [("tree/big", 3_000_000)]
    assert (await sandbox.exec("ls /tmp/.rollyard | grep tree; ls -l tree", timeout_s=20)).stdout.count(b"tree") == 0
    many = {f"many/{number}": str(number) for number in range(250)}
    await sandbox.put_files(many)
    assert (await sandbox.exec("cat many/249; ls many | wc -l", timeout_s=20)).stdout.split() == [b"249250"]
    await sandbox.exec("ln -s /tmp many/out", timeout_s=20)
    with pytest.raises(SandboxError, match=r"many/out/x.*link"):
        await sandbox.put_files({"many/0": "new", "many/out/x": "x"})
    assert await sandbox.read_file("many/0", 10) == b"new"


@pytest.mark.parametrize("binary", [True, False])
async def test_three_megabytes_of_any_bytes_arrive(
    backend: E2bBackend, monkeypatch: pytest.MonkeyPatch, binary: bool
) -> None:
    monkeypatch.setattr(e2b_stream, "BINARY", binary)
    monkeypatch.setattr(e2b_stream, "_ENCODING", "latin-1" if binary else "utf-8")
    monkeypatch.setattr(e2b_stream.E2bEntrance, "binary", binary)
    sandbox = await backend.create(labels(), ALONE)
    said = await sandbox.exec(
        "head -c 3000000 /dev/urandom >x; cat x; printf '\\377' >&2; exit 3",
        timeout_s=60,
        max_output_bytes=4_000_000,
    )
    assert said.stdout == await sandbox.read_file("x", 4_000_000) and len(said.stdout) == 3_000_000
    assert (said.stderr, said.exit_code, said.truncated, said.timed_out) == (b"\xff", 3, False, False)


async def test_a_command_has_its_environment_directory_input_user_and_time(backend: E2bBackend) -> None:
    sandbox = await backend.create(labels(), Plan(network="none", workdir="/testbed"))
    assert sandbox.workdir == "/testbed"
    said = await sandbox.exec(
        'cat; echo "$A" "$HOME"; pwd', cwd="/tmp", env={"A": "a b'c"}, stdin=b"in\0put\n", timeout_s=20
    )
    assert said.stdout == b"in\0put\na b'c /home/user\n/tmp\n"
    assert (await sandbox.exec(("pwd",), timeout_s=20)).stdout == b"/testbed\n"
    assert (await sandbox.exec("touch /testbed/of-user", timeout_s=20)).exit_code == 0
    if os.getuid() == 0:  # else the jails of the server have one user
        for user, uid in (("root", b"0\n"), ("nobody", b"65534\n"), ("4321", b"4321\n")):
            assert (await sandbox.exec("id -u", user=user, timeout_s=20)).stdout == uid
    with pytest.raises(SandboxError, match=r"no such user.*sandbox\.user"):
        await sandbox.exec("true", user="stranger", timeout_s=20)
    assert (await sandbox.exec(("no-such-program",), timeout_s=20)).exit_code == 127
    late = await sandbox.exec("(setsid sleep 4321 &) ; sleep 4321", timeout_s=0.5)
    assert late.timed_out
    assert (await sandbox.exec("pgrep -f '[s]leep 4321'", timeout_s=20)).stdout == b""


STARTER = """
import asyncio, os, sys
from rollyard.harnesses.harness import Command
from rollyard.stages.sandbox import open_backend
from rollyard.schemas.rollout import SandboxRef
import msgspec

async def main():
    settings, ref = msgspec.json.decode(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=SandboxRef)
    async with open_backend("e2b", settings) as backend:
        sandbox = await backend.open(ref)
        command = Command(("sh", "-c", "echo began; sleep 1; echo $A; exit 7"), {"A": "b"})
        assert await sandbox.start("agent", command, deadline_s=60)
        print("started", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_another_process_goes_on_when_the_one_that_started_an_agent_is_killed(
    backend: E2bBackend, server: RunningServer, tmp_path: Path
) -> None:
    import msgspec  # noqa: PLC0415 - for the child's arguments only

    sandbox = await backend.create(labels(), ALONE)
    given = [msgspec.json.encode(each).decode() for each in (server.settings(tmp_path), sandbox.ref)]
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, *given, stdout=asyncio.subprocess.PIPE
    )
    assert starter.stdout is not None
    assert await starter.stdout.readline() == b"started\n"
    starter.kill()
    await starter.wait()

    again = await backend.open(sandbox.ref)
    assert not await again.start("agent", Command(("true",)), deadline_s=60)
    end = await again.wait("agent")
    assert (end.exit_code, end.reason) == (7, "exited")
    assert await again.output("agent", 1000) == (b"began\nb\n", b"")
    # It listened to the running command, and did not merely ask again and again.
    assert (await server.state())["daemon"]["/process.Process/Connect"] == 1


async def test_killing_ends_all_that_a_process_started(backend: E2bBackend) -> None:
    sandbox = await backend.create(labels(), ALONE)
    script = "trap '' TERM; (setsid sleep 5432 &); sleep 5432"
    assert await sandbox.start("agent", Command(("sh", "-c", script)), deadline_s=60)
    waiting = asyncio.create_task(sandbox.wait("agent"))
    await asyncio.sleep(0.3)
    await sandbox.kill("agent")
    assert (await waiting).reason == "killed"
    assert (await sandbox.exec("pgrep -f '[s]leep 5432'", timeout_s=20)).stdout == b""

    assert await sandbox.start("late", Command(("sleep", "5432")), deadline_s=0.5)
    assert (await (await backend.open(sandbox.ref)).wait("late")).reason == "deadline"


async def test_a_shell_keeps_its_state_and_is_quick(backend: E2bBackend) -> None:
    sandbox = await backend.create(labels(), ALONE)
    async with await sandbox.shell(env={"A": "1"}) as shell:
        assert (await shell.run("cd /tmp; B=2; echo $A$B", timeout_s=20)).output == b"12\n"
        assert (await shell.run("pwd; echo $B; false", timeout_s=20)).exit_code == 1
        late = await shell.run("sleep 30; echo never", timeout_s=0.5)
        assert (late.timed_out, late.restarted) == (True, False)  # it was interrupted, the shell lives on
        assert (await shell.run("echo $B", timeout_s=20)).output == b"2\n"
        assert len((await shell.run("head -c 1000000 /dev/zero | tr '\\0' x", timeout_s=20)).output) == 1_000_000
    with pytest.raises(SandboxError, match="terminal"):
        await sandbox.shell(tty=True)


@pytest.mark.slow
async def test_64_sandboxes_at_a_time_over_four_clients(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, clients=4, max_creates=12) as backend:

        async def one(number: int) -> E2bSandbox:
            sandbox = await backend.create(labels(f"ro{number}"), ALONE)
            assert (await sandbox.exec(f"echo {number}", timeout_s=120)).stdout == f"{number}\n".encode()
            return sandbox

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(64)]
        state = await server.state()
        assert state["creates"] == {str(client): 16 for client in range(4)}
        assert state["most_making"] <= 12
        connections = [set(peers) for peers in state["connections"].values()]
        assert len(connections) == 4 and all(connections)
        assert sum(map(len, connections)) == len(set.union(*connections))  # no client uses another's connection
        assert len(await backend.list_owned()) == 64
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task.result().destroy())
        assert (await server.state())["sandboxes"] == {}


async def test_a_busy_service_is_asked_again_and_not_for_ever(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, max_tries=3) as backend:
        # The SDK itself tries four times each time.
        await server.refuse("POST", "/v2/sandboxes$", 429, 6, headers={"Retry-After": "0"})
        await backend.create(labels(), ALONE)
        creates = [request for request in (await server.state())["requests"] if request == "POST /v2/sandboxes"]
        assert len(creates) == 7
        await server.refuse("POST", "/v2/sandboxes$", 429, 1000, headers={"Retry-After": "0"})
        with pytest.raises(SandboxError, match="max_creates"):
            await backend.create(labels("ro2"), ALONE)
        creates = [request for request in (await server.state())["requests"] if request == "POST /v2/sandboxes"]
        assert len(creates) == 7 + 3 * 4


async def test_an_answer_that_was_lost_makes_no_second_sandbox(backend: E2bBackend, server: RunningServer) -> None:
    await server.refuse("POST", "/v2/sandboxes$", 503, 5, headers={"Retry-After": "0"}, after=True)
    sandbox = await backend.create(labels(), ALONE)
    assert [ref for ref, _ in await backend.list_owned()] == [sandbox.ref]


async def test_workers_keep_sandboxes_up_to_their_deadline_and_no_longer(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, timeout_s=2) as backend:
        kept = await backend.create(labels("kept"), ALONE)
        short = await backend.create(labels("short"), Plan(network="none", deadline_s=3))
        began = time.monotonic()
        while time.monotonic() < began + 5:
            await backend.renew_lease()
            await asyncio.sleep(0.2)
        # Twice its time limit later only the one whose deadline is far is there.
        assert [ref for ref, _ in await backend.list_owned()] == [kept.ref]
        timeouts = next(iter((await server.state())["sandboxes"].values()))["timeouts"]
        assert 2 < len(timeouts) < 15 and set(timeouts) == {2}  # not at each call of renew_lease
        with pytest.raises(SandboxError, match="is gone"):
            await short.exec("true", timeout_s=10)
        # Nobody renews any more.
        await asyncio.sleep(3.3)
        assert await backend.list_owned() == []


async def test_opening_a_sandbox_does_not_shorten_its_time(server: RunningServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, timeout_s=600) as backend, opened(server, tmp_path, timeout_s=2) as hasty:
        sandbox = await backend.create(labels(), ALONE)
        assert (await (await hasty.open(sandbox.ref)).exec("echo x", timeout_s=10)).stdout == b"x\n"
        await asyncio.sleep(2.5)
        assert len(await backend.list_owned()) == 1


async def test_a_wrong_key_is_named(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, "another")
    async with opened(server, tmp_path) as backend:
        for call in (backend.create(labels(), ALONE), backend.list_owned()):
            with pytest.raises(SandboxError, match=r"API key.*api_key_env"):
                await call


async def test_a_template_that_is_not_there_is_named(backend: E2bBackend) -> None:
    with pytest.raises(SandboxError, match=r"'nope' not found.*sandbox\.image"):
        await backend.create(labels(), Plan(network="none", image="nope"))


async def test_a_service_that_is_gone_ends_every_call(backend: E2bBackend, server: RunningServer) -> None:
    sandbox = await backend.create(labels(), ALONE)
    await sandbox.start("agent", Command(("sleep", "60")), deadline_s=60)
    waiting = asyncio.create_task(sandbox.wait("agent"))
    await asyncio.sleep(0.2)
    await server.die()
    calls = [sandbox.exec("true", timeout_s=5), backend.create(labels("ro2"), ALONE), backend.renew_lease()]
    async with asyncio.timeout(50):
        ended = await asyncio.gather(waiting, *calls, return_exceptions=True)
    assert [type(each) for each in ended] == [SandboxError] * 4
    assert all("gives no answer" in str(each) for each in ended)


async def test_a_sandbox_that_is_ended_behind_our_back_is_gone(backend: E2bBackend, server: RunningServer) -> None:
    sandbox = await backend.create(labels(), ALONE)
    await sandbox.start("agent", Command(("sleep", "60")), deadline_s=60)
    waiting = asyncio.create_task(sandbox.wait("agent"))
    await asyncio.sleep(0.2)
    await server.ask("kill", sandbox=next(iter((await server.state())["sandboxes"])))
    with pytest.raises(SandboxError, match="is gone"):
        await waiting


async def test_a_connection_that_dies_without_a_word_is_noticed(
    backend: E2bBackend, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2b_stream, "IDLE_S", 0.5)
    sandbox = await backend.create(labels(), ALONE)
    await sandbox.start("agent", Command(("sleep", "60")), deadline_s=60)
    waiting = asyncio.create_task(sandbox.wait("agent"))
    await asyncio.sleep(1.2)
    assert not waiting.done()  # an idle agent is no dead one
    await server.ask("mute", sandbox=next(iter((await server.state())["sandboxes"])))
    with pytest.raises(SandboxError, match="is gone"):
        await waiting


async def test_a_sweep_finds_every_page_and_what_cannot_be_read(
    backend: E2bBackend, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2b_backend, "PAGE", 2)
    made = [await backend.create(labels(f"ro{number}"), ALONE) for number in range(5)]
    client = E2B(api_key=KEY, api_url=server.url, sandbox_url=server.url).AsyncSandbox
    await client.create(timeout=60, metadata={"rollyard": "default"})
    await client.create(timeout=60, metadata={"of": "somebody else"})
    owned = await backend.list_owned()
    assert len(owned) == 6
    assert {ref.handle for ref, found in owned if found.run} == {sandbox.ref.handle for sandbox in made}
    for ref, _ in owned:
        await (await backend.open(ref)).destroy()
    left = (await server.state())["sandboxes"].values()
    assert [sandbox["metadata"] for sandbox in left] == [{"of": "somebody else"}]


async def test_a_snapshot_keeps_the_files(backend: E2bBackend) -> None:
    sandbox = await backend.create(labels(), ALONE)
    await sandbox.put_files({"kept.txt": "here"})
    image = await sandbox.snapshot()
    await sandbox.destroy()
    again = await backend.create(labels(), Plan(network="none", image=image))
    assert await again.read_file("kept.txt", 10) == b"here"
    with pytest.raises(SandboxError, match="git"):
        await again.diff()


async def test_a_folder_of_the_worker_is_refused(backend: E2bBackend, tmp_path: Path) -> None:
    from rollyard.stages.sandbox import Mount  # noqa: PLC0415

    with pytest.raises(SandboxError, match="copy"):
        await backend.create(labels(), Plan(network="none", mounts=(Mount(tmp_path, "/x"),)))
