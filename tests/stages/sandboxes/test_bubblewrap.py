"""The backend bubblewrap, with real jails: as root, and all of it once more as a user without privileges."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import images
import pytest
import unprivileged

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import Limits
from rollyard.stages.sandbox import Change, Labels, Mount, Plan, ProcessEnd
from rollyard.stages.sandboxes import jail_setup
from rollyard.stages.sandboxes.bubblewrap import BubblewrapBackend
from rollyard.stages.sandboxes.census import at_work
from rollyard.stages.sandboxes.families import namespace_of
from rollyard.stages.sandboxes.folder import nonce_of
from rollyard.stages.sandboxes.jail_kin import kin, members
from rollyard.stages.sandboxes.jail_sandbox import BubblewrapSandbox
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID, BubblewrapSettings
from rollyard.stages.sandboxes.marked import marked_processes

LABELS = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)
AS_USER = "TEST_AS_UNPRIVILEGED_USER"
MIB = 1 << 20


def missing() -> str:
    """Why there can be no jails here; empty when there can."""
    try:
        jail_setup.find_tools()
    except SandboxError as error:
        return str(error)
    return images.missing()


@pytest.fixture(scope="module")
def tree() -> str:
    if lack := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lack)
    return str(images.root_tree(DEFAULT_UID if os.getuid() == 0 else None))


def settings_for(folder: Path, **changes: object) -> BubblewrapSettings:
    given = {
        "root": str(folder / "sandboxes"),
        "images": str(folder / "images"),
        "memory_bytes": 256 * MIB,
        "disk_bytes": 32 * MIB,
        "max_processes": 60,
        "max_file_bytes": 64 * MIB,
        "watch_s": 0.2,
        "lease_s": 300.0,
    }
    return BubblewrapSettings.of("bubblewrap", given | changes)


@pytest.fixture
async def backend(tmp_path: Path, tree: str) -> AsyncIterator[BubblewrapBackend]:
    async with BubblewrapBackend(settings_for(tmp_path)) as backend:
        yield backend
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


@pytest.fixture
async def sandbox(backend: BubblewrapBackend, tree: str) -> BubblewrapSandbox:
    return await backend.create(LABELS, Plan(image=tree, network="none"))


def nonce(sandbox: BubblewrapSandbox) -> str:
    return nonce_of(Path(sandbox.ref.handle))


def holder(sandbox: BubblewrapSandbox) -> int:
    return int((Path(sandbox.ref.handle) / "holder").read_text().split()[0])


def living(namespace: int | None) -> list[int]:
    """The processes of a sandbox, without those that are dead already."""
    return [pid for pid in kin().get(namespace or 0, []) if at_work(pid)]


def running(sandbox: BubblewrapSandbox) -> list[int]:
    """The same without the holder."""
    pid = holder(sandbox)
    return members(namespace_of(pid), pid)


def mounts_of(name: str) -> list[str]:
    """Processes that see a mount of a sandbox."""
    found = []
    for file in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            if name in file.read_text():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


def assert_nothing_is_left(folder: str, namespace: int | None) -> None:
    name = Path(folder).name
    assert living(namespace) == []
    assert marked_processes(f"{nonce_of(Path(folder))}.") == []
    assert mounts_of(name) == []
    assert not Path(folder).exists()
    assert not Path(folder + ".gone").exists()


async def said(sandbox: BubblewrapSandbox, script: str, **env: str) -> str:
    done = await sandbox.exec(script, env=env, timeout_s=30)
    assert done.exit_code == 0, done
    return done.stdout.decode()


async def test_what_is_seen_inside(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    told = await said(sandbox, "id -u; hostname; pwd; grep Cap /proc/self/status; env -0 | tr '\\0' ' '", KEY="a b\n'$")
    uid, hostname, cwd, *capabilities, environment, _ = told.splitlines()
    assert (uid, hostname, cwd) == ("0", "sandbox", "/work")
    assert {line.split()[1] for line in capabilities} == {"0" * 16}
    names = {part.split("=")[0] for part in (environment + _).split() if "=" in part}
    assert names == {"PATH", "HOME", "LANG", "KEY", "PWD"}
    assert await said(sandbox, f"ls {tmp_path} 2>&1; [ $(ls /proc | grep -c '^[0-9]') -lt 9 ] && echo few") == (
        f"ls: cannot access '{tmp_path}': No such file or directory\nfew\n"
    )
    assert (await sandbox.exec("unshare -U true; mknod x c 1 1; mount -t tmpfs t /mnt", timeout_s=30)).exit_code != 0


def command_lines() -> str:
    """What everybody on the machine can read of all processes."""
    found = ""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += file.read_text(errors="replace")
    return found


async def test_the_environment_stands_in_no_list_of_processes(sandbox: BubblewrapSandbox) -> None:
    await sandbox.start("agent", Command(("sleep", "100"), {"KEY": "sk-0123456789"}), deadline_s=60)
    async with await sandbox.shell(env={"KEY": "sk-0123456789"}) as shell:
        assert (await shell.run("echo $KEY", timeout_s=30)).output == b"sk-0123456789\n"
        await until(lambda: "sleep\x00100\x00" in command_lines())
        assert "sk-0123456789" not in command_lines()


async def test_without_image_it_sees_this_machine_and_changes_nothing(backend: BubblewrapBackend) -> None:
    sandbox = await backend.create(LABELS, Plan(network="none"))
    assert await said(
        sandbox, "echo x >/work/a; echo y >/new; cat /work/a /new; touch /usr/x 2>/dev/null || echo no"
    ) == ("x\ny\nno\n")
    assert not Path("/new").exists()
    assert [change.path for change in await sandbox.diff()] == ["/new", "/work/a"]


async def test_the_image_is_not_changed_and_neither_are_mounts(
    backend: BubblewrapBackend, tree: str, tmp_path: Path
) -> None:
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "file").write_text("mounted\n")
    plan = Plan(image=tree, network="none", mounts=(Mount(tool, "/opt/rollyard/tool"),))
    sandbox = await backend.create(LABELS, plan)
    script = "cat /opt/rollyard/tool/file; echo x >/opt/rollyard/tool/file || rm /usr/bin/git; echo y >/usr/bin/new"
    done = await sandbox.exec(script, timeout_s=30)
    assert done.stdout == b"mounted\n"
    assert (tool / "file").read_text() == "mounted\n"
    assert Path(tree, "usr/bin/git").exists()
    assert not Path(tree, "usr/bin/new").exists()
    other = await backend.create(LABELS, plan)
    assert await said(other, "ls /usr/bin/git; ls /usr/bin/new 2>/dev/null || true") == "/usr/bin/git\n"


@pytest.mark.parametrize("image", [True, False])
async def test_read_only_leaves_three_folders_to_be_written(
    backend: BubblewrapBackend, tree: str, tmp_path: Path, image: bool
) -> None:
    mounts = (Mount(tmp_path, "/opt/tool"),)
    plan = Plan(image=tree if image else "", network="none", read_only=True, workdir="/srv/work", mounts=mounts)
    sandbox = await backend.create(LABELS, plan)
    script = "for f in / /usr/bin /etc /srv /srv/work $HOME /tmp /dev; do touch $f/x 2>/dev/null && echo $f; done; pwd"
    assert await said(sandbox, script) == "/srv/work\n/root\n/tmp\n/srv/work\n"


async def test_a_tree_of_another_user_is_refused(backend: BubblewrapBackend, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to make one")
    with pytest.raises(SandboxError, match="belongs to user 0"):
        await backend.create(LABELS, Plan(image=str(tmp_path)))
    assert await backend.list_owned() == []


@pytest.mark.parametrize("image", ["nope", "/no/where"])
async def test_a_missing_image_leaves_nothing(backend: BubblewrapBackend, image: str) -> None:
    with pytest.raises(SandboxError, match=f"there is no (image|folder) '?{image}"):
        await backend.create(LABELS, Plan(image=image))
    assert await backend.list_owned() == []


async def test_networks(backend: BubblewrapBackend, tree: str) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    call = f"python3 -c \"import socket; print(socket.create_connection(('127.0.0.1', {port}), 5).recv(9))\""
    async with server:
        closed = await backend.create(LABELS, Plan(image=tree, network="none"))
        assert b"ConnectionRefused" in (await closed.exec(call, timeout_s=30)).stderr
        opened = await backend.create(LABELS, Plan(image=tree, network="open"))
        assert await said(opened, call) == "b'hello'\n"
    assert closed.gateway_url is None
    with pytest.raises(SandboxError, match="there is no relay"):
        await backend.create(LABELS, Plan(image=tree, network="gateway"))


async def test_nothing_is_started_beside_the_event_loop(
    backend: BubblewrapBackend, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What uvloop starts has inheritable files for a moment. What another thread starts then keeps them open."""
    threads = []
    spawn = os.posix_spawn

    def noting(*arguments: Any, **options: Any) -> int:
        threads.append(threading.current_thread())
        return spawn(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawn", noting)
    sandbox = await backend.create(LABELS, Plan(image=tree, network="none"))
    await sandbox.exec("true", timeout_s=30)
    await sandbox.start("agent", Command(("true",), {}), deadline_s=30)
    await sandbox.wait("agent")
    assert len(threads) >= 3
    assert set(threads) == {threading.main_thread()}


async def test_a_snapshot_is_an_image(backend: BubblewrapBackend, sandbox: BubblewrapSandbox) -> None:
    script = """
        echo new >a; ln a b; ln -s /nowhere c; mkfifo pipe; echo hidden >locked; chmod 0 locked
        rm /usr/bin/git; rm -r /etc; mkdir /etc; echo x >/etc/passwd; chmod 700 /home
    """
    await said(sandbox, script)
    changes = await sandbox.diff()
    assert {Change("/usr/bin/git", "deleted"), Change("/etc/group", "deleted"), Change("/work/a", "added")} <= set(
        changes
    )
    assert [change for change in changes if change.path == "/etc/passwd"] == [Change("/etc/passwd", "modified")]
    name = await sandbox.snapshot()
    await sandbox.destroy()
    again = await backend.create(LABELS, Plan(image=name, network="none"))
    told = await said(again, "ls /etc; ls /usr/bin/git 2>&1; cat a; stat -c %h a; readlink c; cat locked; ls; rm a")
    assert told.splitlines() == [
        "passwd", "ls: cannot access '/usr/bin/git': No such file or directory", "new", "2", "/nowhere", "hidden",
        "a", "b", "c", "locked",
    ]  # fmt: skip
    twice = await again.snapshot()
    third = await backend.create(LABELS, Plan(image=twice, network="none"))
    assert await said(third, "ls") == "b\nc\nlocked\n"
    with pytest.raises(SandboxError, match="is the base of"):
        backend.images.remove(name)
    with pytest.raises(SandboxError, match="sandboxes use the image"):
        backend.images.remove(twice)


async def test_links_of_an_agent_lead_nowhere_outside(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    await said(sandbox, f"ln -s {tmp_path} out; ln -s {tmp_path}/secret file; ln -s /etc etc; mkfifo pipe")
    assert await sandbox.read_file("file", 10) is None
    assert await sandbox.read_file("pipe", 10) is None
    with pytest.raises(SandboxError, match="through a link"):
        await sandbox.put_files({"etc/x/y": "z"})
    await sandbox.put_files({"file": "mine"})
    assert (tmp_path / "secret").read_text() == "x"
    assert await sandbox.read_file("file", 10) == b"mine"
    with pytest.raises(SandboxError, match="there is no"):
        await sandbox.get_tree("out/.")


def applets(busybox: Path) -> list[str]:
    return subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True).stdout.split()


async def test_a_tree_of_busybox_alone_will_do(backend: BubblewrapBackend, tree: str, tmp_path: Path) -> None:
    busybox = Path(tree, "usr/bin/busybox")
    if not busybox.exists():
        pytest.skip("this machine has no static busybox")
    root = tmp_path / "root"
    for folder in ("bin", "etc", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for applet in applets(busybox):
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    if backend.uid is not None:
        images.own(root, backend.uid)
    sandbox = await backend.create(LABELS, Plan(image=str(root), network="none"))
    await sandbox.put_files({"a/b": "c", "a/x.pyc": "d"})
    await sandbox.put_tree(await sandbox.get_tree(".", exclude=("*.pyc",)), "copy")
    assert await said(sandbox, "find copy -type f; cat copy/a/b") == "copy/a/b\nc"
    assert await sandbox.read_file("copy/a/b", 10) == b"c"
    async with await sandbox.shell() as shell:
        assert (await shell.run("echo here", timeout_s=30)).output == b"here\n"


ABUSE = {
    "ignores TERM": ("trap '' TERM INT HUP; while :; do sleep 1; done", "deadline"),
    "daemonises": ("(setsid sh -c 'env -i setsid sleep 1000' &) ; exit 5", "exited"),
    "kills everybody": ("sleep 1000 & kill -9 -1; exit 5", "exited"),
    "kills its parent": ("kill -9 $PPID 1; exit 5", "exited"),
    "deletes its home": ("rm -rf $HOME /work /tmp/* 2>/dev/null; exit 5", "exited"),
    "forks": ("while :; do (sleep 1000 &) 2>/dev/null; done", "deadline"),
    "bombs": ("python3 -c 'import os\nwhile 1:\n try: os.fork()\n except OSError: pass'", "deadline"),
}


@pytest.mark.parametrize("what", ABUSE)
async def test_abuse_ends_within_its_budget_and_leaves_nothing(
    backend: BubblewrapBackend, sandbox: BubblewrapSandbox, tree: str, what: str
) -> None:
    script, reason = ABUSE[what]
    namespace = namespace_of(holder(sandbox))
    beside = await backend.create(LABELS, Plan(image=tree, network="none"))
    await sandbox.start("agent", Command(("sh", "-c", script)), deadline_s=1.5)
    assert await said(beside, "echo unharmed") == "unharmed\n"
    end = await sandbox.wait("agent")
    assert end == ProcessEnd(-9 if reason == "deadline" else 5, reason)  # type: ignore[arg-type]
    # Whoever is left is dead, though the kernel may not be through with it.
    await until(lambda: not running(sandbox))
    assert await said(sandbox, "pwd; echo still here") == "/work\nstill here\n"
    await sandbox.destroy()
    assert_nothing_is_left(sandbox.ref.handle, namespace)


async def test_disk_is_limited(sandbox: BubblewrapSandbox) -> None:
    for where in ("/work", "/tmp", "/dev/shm"):
        done = await sandbox.exec(f"head -c 60000000 /dev/zero >{where}/big", timeout_s=30)
        assert b"No space left" in done.stderr, done
        await said(sandbox, f"rm {where}/big")
    assert (await sandbox.exec("head -c 60000000 /dev/zero >/dev/big", timeout_s=30)).exit_code != 0
    many = await sandbox.exec("mkdir m; cd m; seq 200000 | xargs touch", timeout_s=60)
    assert b"No space left" in many.stderr


async def test_a_flood_of_output_ends_at_the_cap(sandbox: BubblewrapSandbox) -> None:
    await sandbox.start("agent", Command(("sh", "-c", "yes | head -c 1000000000; echo $? >&2")), deadline_s=60)
    assert (await sandbox.wait("agent")).reason == "exited"
    assert (Path(sandbox.ref.handle) / "control" / "agent" / "stdout").stat().st_size == 64 * MIB
    assert len((await sandbox.output("agent", 1000))[0]) == 1000


GROW = "x = b'x' * {size}; import time; print('grown', flush=True); time.sleep(1000)"


async def test_memory_is_watched(backend: BubblewrapBackend, tree: str) -> None:
    plan = Plan(image=tree, network="none", limits=Limits(memory_bytes=64 * MIB))
    sandbox = await backend.create(LABELS, plan)
    modest = Command(("python3", "-c", GROW.format(size=20_000_000)))
    await sandbox.start("modest", modest, deadline_s=60)
    async with asyncio.timeout(30):
        while (await sandbox.output("modest", 100))[0] != b"grown\n":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    assert (await sandbox.stats()).memory_bytes in range(20_000_000, 64 * MIB)
    # Two of them are too much: the limit is the sandbox's.
    await sandbox.start("other", Command(("python3", "-c", GROW.format(size=50_000_000))), deadline_s=60)
    assert await sandbox.wait("other") == ProcessEnd(-9, "memory")
    assert await sandbox.wait("modest") == ProcessEnd(-9, "memory")
    with pytest.raises(SandboxError, match="memory limit"):
        await sandbox.exec(("python3", "-c", GROW.format(size=100_000_000)), timeout_s=60)
    assert await said(sandbox, "echo still here") == "still here\n"


OTHER_WORKER = """
import asyncio, sys
from rollyard.harnesses.harness import Command
from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.sandboxes.bubblewrap import BubblewrapBackend, BubblewrapSettings

async def main(root, place, handle, script):
    async with BubblewrapBackend(BubblewrapSettings(root=root)) as backend:
        sandbox = await backend.open(SandboxRef(backend="bubblewrap", place=place, handle=handle))
        print(await sandbox.start("agent", Command(("sh", "-c", script)), deadline_s=60), flush=True)
        shell = await sandbox.shell()
        print(await shell.run("sleep 1000 & echo shell", timeout_s=30), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_agent_outlives_its_worker_and_the_next_one_attaches(
    backend: BubblewrapBackend, sandbox: BubblewrapSandbox
) -> None:
    script = "echo run >>runs; while [ ! -e go ]; do sleep 0.02; done; exit 7"
    ref = sandbox.ref
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OTHER_WORKER, str(backend.root.parent), ref.place, ref.handle, script,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"True\n"
    assert b"shell" in await worker.stdout.readline()
    before = len(running(sandbox))
    worker.kill()
    await worker.wait()
    await until(lambda: len(running(sandbox)) < before)
    assert not await sandbox.start("agent", Command(("false",)), deadline_s=60)
    waiting = asyncio.create_task(sandbox.wait("agent"))
    await sandbox.put_files({"go": ""})
    assert await waiting == ProcessEnd(7, "exited")
    assert await sandbox.read_file("runs", 100) == b"run\n"
    # The shell died with its worker, without anybody's help.
    assert running(sandbox) == []


async def test_an_unrenewed_lease_ends_everything_without_any_worker(tmp_path: Path, tree: str) -> None:
    settings = settings_for(tmp_path, lease_s=1.0)
    async with BubblewrapBackend(settings) as backend:
        sandbox = await backend.create(LABELS, Plan(image=tree, network="none"))
        namespace = namespace_of(holder(sandbox))
        await sandbox.start("agent", Command(("sh", "-c", "setsid sleep 1000 & sleep 1000")), deadline_s=60)
    await until(lambda: not living(namespace))
    async with BubblewrapBackend(settings) as backend:
        found = await backend.open(sandbox.ref)
        assert await found.wait("agent") == ProcessEnd(-9, "lease")
        with pytest.raises(SandboxError, match="no worker renewed its lease"):
            await found.exec("true", timeout_s=10)
        await found.destroy()
    assert_nothing_is_left(sandbox.ref.handle, namespace)


async def test_the_deadline_of_a_sandbox_ends_everything(backend: BubblewrapBackend, tree: str) -> None:
    sandbox = await backend.create(LABELS, Plan(image=tree, network="none", deadline_s=1.0))
    namespace = namespace_of(holder(sandbox))
    await sandbox.start("agent", Command(("sleep", "1000")), deadline_s=60)
    assert await sandbox.wait("agent") == ProcessEnd(-9, "deadline")
    await until(lambda: not living(namespace))
    with pytest.raises(SandboxError, match="its deadline has passed"):
        await sandbox.exec("true", timeout_s=10)


async def killed_shim(sandbox: BubblewrapSandbox, processes: int) -> None:
    """Start an agent, and kill its shim as soon as the jail has that many processes."""
    await sandbox.start("agent", Command(("sh", "-c", "setsid sleep 1000 & sleep 1000")), deadline_s=60)
    record = Path(sandbox.ref.handle) / "control/agent/pid"
    await until(lambda: record.exists() and record.read_text().endswith("\n"))
    await until(lambda: len(running(sandbox)) >= processes)
    pid = record.read_text().split()[0]
    shim = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    os.kill(shim, signal.SIGKILL)


async def test_a_killed_shim_takes_its_jail_with_it(sandbox: BubblewrapSandbox) -> None:
    await killed_shim(sandbox, 4)
    await until(lambda: not running(sandbox))
    assert await sandbox.wait("agent") == ProcessEnd(None, "lost")


async def test_a_jail_that_was_not_bound_to_its_shim_yet_is_ended_by_who_waits(sandbox: BubblewrapSandbox) -> None:
    await killed_shim(sandbox, 0)
    assert await sandbox.wait("agent") == ProcessEnd(None, "lost")
    await until(lambda: not running(sandbox))


TAKE_OVER = """
import ctypes, os, re, time
pid = os.getpid()
text = [line for line in open("/proc/1/maps") if "r-xp" in line and ("libc" in line or "ld-" in line)]
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
libc.ptrace.restype = ctypes.c_long
assert libc.ptrace(16, 1, 0, 0) == 0
os.waitpid(1, 0x40000000)

class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulong) for name in (
        "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss"
        " fs_base gs_base ds es fs gs").split()]

# Let it call prctl(PR_SET_PDEATHSIG, 0), then forget its environment.
registers, before = Registers(), Registers()
libc.ptrace(12, 1, 0, ctypes.addressof(registers))
ctypes.memmove(ctypes.addressof(before), ctypes.addressof(registers), ctypes.sizeof(before))
start = int(text[0].split("-")[0], 16)
memory = open("/proc/1/mem", "r+b", buffering=0)
memory.seek(start)
code = memory.read(4)
memory.seek(start)
memory.write(b"\\x0f\\x05\\xcc\\xcc")
registers.rax = registers.orig_rax = 157
registers.orig_rax = 2**64 - 1
registers.rdi, registers.rsi, registers.rip = 1, 0, start
libc.ptrace(13, 1, 0, ctypes.addressof(registers))
libc.ptrace(7, 1, 0, 0)
os.waitpid(1, 0x40000000)
libc.ptrace(12, 1, 0, ctypes.addressof(registers))
print("prctl gave", registers.rax, flush=True)
memory.seek(start)
memory.write(code)
stat = open("/proc/1/stat").read().rpartition(") ")[2].split()
env_start, env_end = int(stat[47]), int(stat[48])
memory.seek(env_start)
memory.write(bytes(env_end - env_start))
libc.ptrace(13, 1, 0, ctypes.addressof(before))
libc.ptrace(17, 1, 0, 0)
time.sleep(1000)
"""


async def test_a_jail_whose_first_process_was_taken_over_is_ended_too(sandbox: BubblewrapSandbox) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("it speaks x86-64")
    await sandbox.start("agent", Command(("python3", "-c", TAKE_OVER)), deadline_s=60)
    async with asyncio.timeout(30):
        while b"prctl" not in (output := await sandbox.output("agent", 1000))[0]:
            if output[1]:
                pytest.skip(f"programs may not trace each other here: {output[1].decode()[-200:]}")
            await asyncio.sleep(0.01)
    assert output[0] == b"prctl gave 0\n"
    await asyncio.sleep(0.2)
    pid = int((Path(sandbox.ref.handle) / "control/agent/pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    assert (await sandbox.wait("agent")).reason == "exited"
    async with asyncio.timeout(10):
        await until(lambda: not running(sandbox))


async def test_destroying_in_the_first_moments_leaves_nothing(backend: BubblewrapBackend, tree: str) -> None:
    for delay_ms in range(0, 22, 2):
        sandbox = await backend.create(LABELS, Plan(image=tree, network="none"))
        namespace = namespace_of(holder(sandbox))
        starting = asyncio.create_task(
            sandbox.start("agent", Command(("sh", "-c", "setsid sleep 1000 & sleep 1000")), deadline_s=60)
        )
        await asyncio.sleep(delay_ms / 1000)
        other = await backend.open(sandbox.ref)
        async with asyncio.TaskGroup() as group:
            group.create_task(sandbox.destroy())
            group.create_task(other.destroy())
        await asyncio.wait([starting])
        starting.exception()
        assert_nothing_is_left(sandbox.ref.handle, namespace)


async def test_a_cancelled_creation_leaves_nothing(backend: BubblewrapBackend, tree: str) -> None:
    for delay_ms in range(0, 40, 8):
        creating = asyncio.create_task(backend.create(LABELS, Plan(image=tree, network="none")))
        await asyncio.sleep(delay_ms / 1000)
        creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():
            await creating.result().destroy()
    await until(lambda: not mounts_of(str(backend.root)))
    assert await backend.list_owned() == []


async def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jail_setup, "_SEARCH", str(tmp_path))
    with pytest.raises(SandboxError, match="needs the program 'bwrap'") as refused:
        async with BubblewrapBackend(settings_for(tmp_path)):
            pass
    assert "package bubblewrap" in str(refused.value)


WITHOUT_NAMESPACES = """
import asyncio, sys
from rollyard.stages.sandboxes.bubblewrap import BubblewrapBackend, BubblewrapSettings

async def main(root):
    async with BubblewrapBackend(BubblewrapSettings(root=root)):
        pass

asyncio.run(main(sys.argv[1]))
"""


def test_a_machine_without_user_namespaces_says_what_to_do(tmp_path: Path, tree: str) -> None:
    off = 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$0" -c "$1" "$2"'
    line = ["unshare", "-Ur", "sh", "-c", off, sys.executable, WITHOUT_NAMESPACES, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert "SandboxError: this machine does not allow" in done.stderr
    assert "sysctl user.max_user_namespaces" in done.stderr


@pytest.mark.slow
def test_all_of_this_as_a_user_without_privileges(tree: str) -> None:
    if os.getuid() != 0 or AS_USER in os.environ:
        pytest.skip("the other tests run as one")
    if lack := unprivileged.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lack)
    with unprivileged.folder() as home, unprivileged.folder() as aside:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(home / "t"), __file__]
        env = {"HOME": str(home), "PATH": os.environ["PATH"], AS_USER: "1", "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            unprivileged.command(argv, aside), env=env, capture_output=True, text=True, check=False, timeout=280
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
