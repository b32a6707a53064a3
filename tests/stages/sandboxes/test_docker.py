"""The docker backend, with a real engine."""

from __future__ import annotations

import asyncio
import gc
import io
import tarfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker_engine
import pytest
from msgspec import structs

from rollyard.gateway.relay.service import fixed_relay
from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import Limits
from rollyard.stages.sandbox import Labels, Mount, Plan, ProcessEnd
from rollyard.stages.sandboxes.docker import DockerBackend
from rollyard.stages.sandboxes.docker_sandbox import DockerSandbox
from rollyard.stages.sandboxes.docker_settings import DockerSettings

LABELS = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)
QUIET = Plan(network="none")


def sh(script: str, **env: str) -> Command:
    return Command(("sh", "-c", script), env)


def a_backend(folder: Path, **more: object) -> DockerBackend:
    settings = {
        "root": str(folder),
        "installation": uuid.uuid4().hex,
        "image": docker_engine.root_image(),
        "pull": False,
    }
    return DockerBackend.from_settings(settings | more)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    docker_engine.require()
    async with a_backend(tmp_path) as backend:
        yield backend
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


@pytest.fixture
async def sandbox(backend: DockerBackend) -> DockerSandbox:
    return await backend.create(LABELS, QUIET)


@pytest.fixture
def collected() -> Iterator[None]:
    """Garbage of this test is not left to the next one."""
    yield
    gc.collect()


async def said(sandbox: DockerSandbox, script: str, **given: object) -> str:
    done = await sandbox.exec(script, timeout_s=60, **given)
    assert done.exit_code == 0, done
    return done.stdout.decode()


async def test_a_sandbox_has_no_capabilities_and_no_network(sandbox: DockerSandbox) -> None:
    status = await said(sandbox, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert (await said(sandbox, "ls /sys/class/net")).split() == ["lo"]
    assert (await said(sandbox, "pwd; echo $HOME; id -u")).split() == ["/rollyard/work", "/rollyard/home", "0"]


async def test_another_process_opens_it_and_finds_what_runs(backend: DockerBackend, tmp_path: Path) -> None:
    sandbox = await backend.create(LABELS, QUIET)
    await sandbox.put_files({"file": "content"})
    assert await sandbox.start("agent", sh("cat file; sleep 1; exit 3"), deadline_s=60)
    await sandbox.close_channels()
    async with a_backend(tmp_path, installation=backend.settings.installation) as other:
        found = await other.open(sandbox.ref)
        assert (found.workdir, found.home) == (sandbox.workdir, sandbox.home)
        assert not await found.start("agent", sh("true"), deadline_s=60)
        assert await found.wait("agent") == ProcessEnd(3, "exited")
        assert await found.output("agent", 99) == (b"content", b"")
        await found.close_channels()


async def test_what_is_listed_is_who_it_belongs_to(backend: DockerBackend, tmp_path: Path) -> None:
    sandbox = await backend.create(structs.replace(LABELS, role="eval", attempt=7), QUIET)
    assert await backend.list_owned() == [(sandbox.ref, structs.replace(LABELS, role="eval", attempt=7))]
    async with a_backend(tmp_path) as another_installation:
        assert await another_installation.list_owned() == []
        assert another_installation.place != backend.place
        with pytest.raises(SandboxError, match="moves to a new attempt"):
            await another_installation.open(sandbox.ref)


async def test_a_destroyed_sandbox_is_gone_for_everybody(backend: DockerBackend, sandbox: DockerSandbox) -> None:
    await sandbox.start("agent", sh("sleep 1000"), deadline_s=60)
    again = await backend.open(sandbox.ref)
    await asyncio.gather(sandbox.destroy(), again.destroy())
    await sandbox.destroy()
    assert await backend.list_owned() == []
    for use in (
        sandbox.exec("true", timeout_s=5),
        again.wait("agent"),
        sandbox.start("other", sh("true"), deadline_s=5),
        sandbox.stats(),
        (await backend.open(sandbox.ref)).put_files({"a": "b"}),
    ):
        with pytest.raises(SandboxError, match="gone"):
            await use
    await (await backend.open(sandbox.ref)).destroy()


async def test_a_container_that_is_none_of_ours_is_not_opened(backend: DockerBackend) -> None:
    client_made = await backend.engine.call(
        lambda client: client.create_container(docker_engine.root_image(), ["true"])["Id"]
    )
    try:
        with pytest.raises(SandboxError, match="no sandbox"):
            await backend.open(SandboxRef(backend="docker", place=backend.place, handle=client_made))
        assert await backend.list_owned() == []
    finally:
        await backend.engine.call(lambda client: client.remove_container(client_made))


async def test_a_sandbox_ends_at_its_deadline_though_nobody_is_there(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, Plan(network="none", deadline_s=2))
    await sandbox.start("agent", sh("sleep 1000"), deadline_s=1000)
    await sandbox.close_channels()
    async with asyncio.timeout(30):
        while await backend.list_owned():  # noqa: ASYNC110 - the engine is looked at
            await asyncio.sleep(0.1)
    with pytest.raises(SandboxError, match="gone"):
        await sandbox.wait("agent")


async def test_users_and_directories(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, Plan(network="none", user="1000:1000", workdir="/srv/new/dir"))
    assert (await said(sandbox, "id -u; pwd; touch file $HOME/file; stat -c %u file")).split() == [
        "1000",
        "/srv/new/dir",
        "1000",
    ]
    assert (await said(sandbox, "id -u", user="0")).strip() == "0"
    assert (await said(sandbox, "id -u", user="agent")).strip() == "1000"
    assert (await said(sandbox, "id -u", user="")).strip() == "1000"
    await sandbox.put_tree(tar_of("x", b"y"), "tree")
    assert (await said(sandbox, "stat -c %u tree/x")).strip() == "1000"
    with pytest.raises(SandboxError, match="nobody-of-this-name"):
        await sandbox.exec("true", user="nobody-of-this-name", timeout_s=5)
    # An agent of another user than root cannot kill what keeps the sandbox.
    await sandbox.start("agent", sh("kill -9 -1; sleep 1"), deadline_s=60)
    assert (await sandbox.wait("agent")).reason == "lost"
    assert (await said(sandbox, "echo on")).strip() == "on"


def tar_of(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


async def test_a_read_only_sandbox_can_be_worked_in(backend: DockerBackend) -> None:
    limits = Limits(disk_bytes=8 << 20)
    plan = Plan(network="none", read_only=True, workdir="/srv", limits=limits)
    sandbox = await backend.create(LABELS, plan)
    await sandbox.put_files({"a": "b"})
    await sandbox.put_files({"a": "b"}, base="home")
    await sandbox.put_tree(tar_of("x", b"y"), "tree")
    assert await said(sandbox, "cat a ~/a tree/x; echo x >/tmp/x; cat /tmp/x") == "bbyx\n"
    denied = await sandbox.exec("echo x >/usr/bin/x", timeout_s=30)
    assert b"Read-only file system" in denied.stderr
    full = await sandbox.exec("head -c 20000000 /dev/zero >/tmp/big", timeout_s=30)
    assert b"No space left" in full.stderr
    with pytest.raises(SandboxError, match="in memory"):
        await sandbox.snapshot()
    volumes = await backend.engine.call(lambda client: client.inspect_container(sandbox.ref.handle)["Mounts"])
    names = [mount["Name"] for mount in volumes if mount["Type"] == "volume"]
    await sandbox.destroy()
    left = await backend.engine.call(lambda client: client.volumes()["Volumes"])
    assert names and not {volume["Name"] for volume in left or []} & set(names)


async def test_a_disk_limit_is_kept_or_refused(backend: DockerBackend) -> None:
    try:
        sandbox = await backend.create(LABELS, Plan(network="none", limits=Limits(disk_bytes=20 << 20)))
    except SandboxError as error:
        assert "read_only: true" in error.hint
        assert await backend.list_owned() == []
    else:
        full = await sandbox.exec("head -c 40000000 /dev/zero >big", timeout_s=60)
        assert b"No space left" in full.stderr


async def test_limits_are_kept_and_memory_is_told_apart(backend: DockerBackend) -> None:
    limits = Limits(memory_bytes=64 << 20, max_processes=40, cpus=0.5, max_file_bytes=1 << 20)
    sandbox = await backend.create(LABELS, Plan(network="none", limits=limits))
    await sandbox.start("agent", Command(("python3", "-c", "x = bytearray(1 << 30)")), deadline_s=60)
    assert await sandbox.wait("agent") == ProcessEnd(-9, "memory")
    await sandbox.start("other", sh("kill -9 $$"), deadline_s=60)
    assert await sandbox.wait("other") == ProcessEnd(-9, "exited")
    big = await sandbox.exec("head -c 5000000 /dev/zero >big; stat -c %s big", timeout_s=60)
    assert int(big.stdout) == 1 << 20
    script = "import os, time\nfor n in range(60):\n    if not os.fork(): time.sleep(5); os._exit(0)"
    assert b"Resource temporarily unavailable" in (await sandbox.exec(("python3", "-c", script), timeout_s=60)).stderr
    spent = "import time, os\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(os.times().user)"
    assert float((await sandbox.exec(("python3", "-c", spent), timeout_s=60)).stdout) < 0.8
    stats = await sandbox.stats()
    assert stats.memory_bytes is not None and 0 < stats.memory_bytes < 64 << 20
    assert stats.cpu_s and stats.processes and stats.disk_bytes and stats.disk_bytes > 1 << 20


async def test_folders_are_seen_inside_but_not_changed(backend: DockerBackend, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "file").write_text("content")
    mounts = (Mount(tmp_path / "bundle", "/opt/rollyard/agent"),)
    sandbox = await backend.create(LABELS, Plan(network="none", mounts=mounts))
    assert await said(sandbox, "cat /opt/rollyard/agent/file") == "content"
    assert (await sandbox.exec("echo x >/opt/rollyard/agent/file", timeout_s=30)).exit_code != 0
    missing = Plan(network="none", mounts=(Mount(tmp_path / "none", "/x"),))
    with pytest.raises(SandboxError, match="bind source path does not exist"):
        await backend.create(LABELS, missing)
    assert len(await backend.list_owned()) == 1


async def test_a_snapshot_is_an_image_for_another_sandbox(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, Plan(network="none", user="agent"))
    await sandbox.put_files({"file": "kept"})
    await sandbox.start("agent", sh("true"), deadline_s=30)
    await sandbox.wait("agent")
    image = await sandbox.snapshot()
    try:
        copy = await backend.create(LABELS, Plan(network="none", image=image))
        assert await said(copy, "cat file; id -u; pwd") == "kept1000\n/rollyard/work\n"
        assert await copy.start("agent", sh("exit 4"), deadline_s=30)  # what the first one started does not count
        assert await copy.wait("agent") == ProcessEnd(4, "exited")
        await copy.destroy()
    finally:
        await backend.engine.call(lambda client: client.remove_image(image, force=True))


async def test_what_differs_from_the_image_is_told(sandbox: DockerSandbox) -> None:
    assert await sandbox.diff() == []
    await sandbox.exec("echo x >/etc/new; echo x >>/etc/passwd; rm /etc/hostname.none /usr/bin/whoami", timeout_s=30)
    changes = {change.path: change.kind for change in await sandbox.diff()}
    assert changes["/etc/new"] == "added"
    assert changes["/etc/passwd"] == "modified"
    assert changes["/usr/bin/whoami"] == "deleted"
    assert not any("control" in path for path in changes)


async def test_the_network_is_taken_away_and_given_back(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, QUIET)
    await sandbox.set_network("open")
    links = (await said(sandbox, "ls /sys/class/net")).split()
    assert len(links) == 2
    await sandbox.set_network("open")
    await sandbox.set_network("none")
    assert (await said(sandbox, "ls /sys/class/net")).split() == ["lo"]
    for mode in ("allow", "gateway"):
        with pytest.raises(SandboxError):
            await sandbox.set_network(mode)  # type: ignore[arg-type]


async def test_a_shell_is_a_terminal_if_asked_for(sandbox: DockerSandbox) -> None:
    async with await sandbox.shell(env={"A": "b"}) as shell:
        await shell.run("cd /usr", timeout_s=30)
        assert (await shell.run("pwd; echo $A; [ -t 1 ] || echo no", timeout_s=30)).output == b"/usr\nb\nno\n"
        assert (await shell.run("sleep 100", timeout_s=0.5)).timed_out
        assert (await shell.run("head -c 3000000 /dev/zero | tr '\\0' x", timeout_s=30)).truncated
    async with await sandbox.shell(tty=True) as shell:
        assert b"yes" in (await shell.run("[ -t 1 ] && echo yes", timeout_s=30)).output
    assert (await said(sandbox, "ps | grep -c '[s]leep 100' || :")).strip() == "0"


async def test_nothing_is_left_of_a_container_that_cannot_be_made(backend: DockerBackend) -> None:
    with pytest.raises(SandboxError, match=r"no image 'no/such:image'.*docker pull"):
        await backend.create(LABELS, Plan(image="no/such:image", network="none"))
    with pytest.raises(SandboxError, match="POSIX sh"):
        await backend.create(LABELS, Plan(image=docker_engine.bare_image(), network="none"))
    with pytest.raises(SandboxError, match="no-such-user"):
        await backend.create(LABELS, Plan(user="no-such-user", network="none"))
    with pytest.raises(SandboxError, match="no rollout id"):
        await backend.create(structs.replace(LABELS, rollout_id="a b"), QUIET)
    with pytest.raises(SandboxError, match="relay"):
        await backend.create(LABELS, Plan(network="gateway"))
    assert await backend.list_owned() == []


async def test_nothing_is_left_of_a_creation_that_is_cancelled(backend: DockerBackend) -> None:
    for wait_s in (0.0, 0.05, 0.2, 0.35):
        task = asyncio.create_task(backend.create(LABELS, QUIET))
        await asyncio.sleep(wait_s)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await (task.result()).destroy()
    await asyncio.sleep(1)
    async with asyncio.timeout(30):
        while await backend.list_owned():  # noqa: ASYNC110 - the engine is looked at
            await asyncio.sleep(0.1)


async def test_an_image_with_nothing_but_busybox_will_do(backend: DockerBackend) -> None:
    sandbox = await backend.create(LABELS, Plan(image=docker_engine.busybox_image(), network="none"))
    await sandbox.put_files({"a": "b"})
    assert await said(sandbox, "cat a") == "b"
    await sandbox.start("agent", sh("env -i setsid sleep 1234 & exit 2"), deadline_s=30)
    assert await sandbox.wait("agent") == ProcessEnd(2, "exited")
    assert "1234" not in await said(sandbox, "ps")
    assert await sandbox.get_tree("a")
    async with await sandbox.shell() as shell:
        assert (await shell.run("cat a", timeout_s=30)).output == b"b"


async def test_the_gateway_is_reached_and_nothing_else(tmp_path: Path) -> None:
    docker_engine.require()
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\npong")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    fetch = 'import urllib.request as u; print(u.urlopen("{url}/v1/x", timeout=20).read().decode())'
    async with (
        fixed_relay(tmp_path / "relay", [url]),
        a_backend(tmp_path, relay=str(tmp_path / "relay")) as backend,
    ):
        sandbox = await backend.create(LABELS, Plan(network="gateway"))
        try:
            assert sandbox.gateway_url == "http://127.0.0.1:8400"
            reach = ("python3", "-c", fetch.format(url=sandbox.gateway_url))
            assert (await sandbox.exec(reach, timeout_s=60)).stdout == b"pong\n"
            assert (await sandbox.exec(("python3", "-c", fetch.format(url=url)), timeout_s=60)).exit_code == 1
            # Who ends the way to the gateway gets another with the next command.
            await sandbox.start("agent", sh("kill -9 -1"), deadline_s=30)
            await sandbox.wait("agent")
            assert (await sandbox.exec(reach, timeout_s=60)).stdout == b"pong\n"
            await sandbox.start("again", Command(reach), deadline_s=60)
            assert await sandbox.wait("again") == ProcessEnd(0, "exited")
            with pytest.raises(SandboxError, match="cannot be taken away"):
                await sandbox.set_network("none")
        finally:
            await sandbox.destroy()
    server.close()
    assert len(asked) == 3


# docker-py leaves the socket of a connection that it could not make to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_engine_that_is_away_is_told(tmp_path: Path, collected: None) -> None:
    settings = DockerSettings(root=str(tmp_path), base_url=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match="cannot be reached"):
        await DockerBackend(settings).__aenter__()
    with pytest.raises(ConfigError, match="base_url"):
        DockerBackend(DockerSettings(root=str(tmp_path), base_url="ftp://x"))
    with pytest.raises(ConfigError, match="no_such"):
        DockerBackend.from_settings({"root": "x", "no_such": 1})


# docker-py leaves the socket of a connection that it could not make to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_the_engine_going_away_is_an_error_not_a_hang(tmp_path: Path, collected: None) -> None:
    """Through a proxy, which can be ended without ending the engine of others."""
    docker_engine.require()
    pairs: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection("/var/run/docker.sock")
        pairs.update((writer, back))
        await asyncio.wait([asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))])

    server = await asyncio.start_unix_server(carry, tmp_path / "proxy.sock")
    async with a_backend(tmp_path, base_url=f"unix://{tmp_path}/proxy.sock") as backend:
        sandbox = await backend.create(LABELS, QUIET)
        await sandbox.start("agent", sh("sleep 1000"), deadline_s=60)
        waiting = asyncio.create_task(sandbox.wait("agent"))
        await asyncio.sleep(0.2)
        server.close()
        (tmp_path / "proxy.sock").unlink()
        for writer in pairs:
            writer.close()
        began = time.monotonic()
        for use in (waiting, sandbox.exec("true", timeout_s=5), backend.list_owned()):
            with pytest.raises(SandboxError, match="cannot be reached"):
                await use
        assert time.monotonic() - began < 30
    async with a_backend(tmp_path, installation=backend.settings.installation) as other:
        await (await other.open(structs.replace(sandbox.ref, place=other.place))).destroy()
