"""The local backend, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.sandbox import Labels, ProcessEnd, check_path, open_backend
from rollyard.stages.sandboxes.local import LocalBackend, LocalSandbox, LocalSettings

LABELS = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)
DETACH = """
import os, sys
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
os.execvp("sleep", sys.argv[1:])
"""


def sh(script: str, **env: str) -> Command:
    return Command(("sh", "-c", script), env)


def running(nap: str) -> list[int]:
    """Processes that are `sleep nap`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_text() == f"sleep\0{nap}\0":
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


def names_in(folder: str | Path) -> list[str]:
    return [entry.name for entry in Path(folder).iterdir()]


def a_sleep() -> str:
    """An argument of `sleep` that no other process has."""
    return f"1000.{uuid.uuid4().int % 10**12:012d}"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(LocalSettings(root=str(tmp_path / "sandboxes"))) as backend:
        yield backend
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


@pytest.fixture
async def sandbox(backend: LocalBackend) -> LocalSandbox:
    return await backend.create(LABELS)


async def test_a_process_ends_with_its_exit_code_and_output(sandbox: LocalSandbox) -> None:
    assert await sandbox.start("agent", sh("cat; echo err >&2; exit 3", A="b"), deadline_s=30)
    assert await sandbox.wait("agent") == ProcessEnd(3, "exited")
    assert await sandbox.output("agent", 100) == (b"", b"err\n")
    assert await sandbox.start("stdin", Command(("cat",), stdin=b"in \0 \xff"), deadline_s=30)
    assert await sandbox.wait("stdin") == ProcessEnd(0, "exited")
    assert await sandbox.output("stdin", 100) == (b"in \0 \xff", b"")
    assert await sandbox.output("stdin", 3) == (b" \0 \xff"[-3:], b"")


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (Command(("kill-me-not",)), ProcessEnd(127, "exited")),
        (sh("kill -TERM $$"), ProcessEnd(-15, "exited")),
        (sh("kill -INT $$; exit 9"), ProcessEnd(-2, "exited")),
        (
            Command((sys.executable, "-c", "import signal as s; exit(s.getsignal(s.SIGPIPE) is s.SIG_DFL)")),
            ProcessEnd(0, "exited"),
        ),
    ],
)
async def test_exit_codes_and_signals(sandbox: LocalSandbox, command: Command, end: ProcessEnd) -> None:
    await sandbox.start("agent", command, deadline_s=30)
    assert await sandbox.wait("agent") == end


async def test_the_environment_is_scrubbed(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    result = await sandbox.exec("env -0; pwd", env={"MINE": "a b\n'\"$x`"}, timeout_s=30)
    *variables, cwd = result.stdout.decode().split("\0")
    env = dict(variable.split("=", 1) for variable in variables)
    for name in ("PWD", "SHLVL", "_"):
        env.pop(name, None)
    assert env.pop("ROLLYARD_PROCESS")
    assert env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": sandbox.home,
        "LANG": "C.UTF-8",
        "TMPDIR": env["TMPDIR"],
        "MINE": "a b\n'\"$x`",
    }
    assert Path(env["TMPDIR"]).is_dir()
    assert cwd.strip() == sandbox.workdir


@pytest.mark.parametrize("name", ["a.b", "", "1a", "IFS", "PWD", "shim_work", "ROLLYARD_PROCESS"])
async def test_a_variable_that_a_shell_would_lose_is_refused(sandbox: LocalSandbox, name: str) -> None:
    with pytest.raises(SandboxError, match="cannot be set in a local sandbox"):
        await sandbox.exec("true", env={name: "x"}, timeout_s=30)


async def test_the_deadline_kills_grandchildren_that_left_group_and_parent(sandbox: LocalSandbox) -> None:
    detached, plain = a_sleep(), a_sleep()
    script = f'{sys.executable} -c "$DETACH" sleep {detached}; setsid sleep {plain} & sleep {plain}'
    await sandbox.start("agent", sh(script, DETACH=DETACH), deadline_s=1)
    await until(lambda: running(detached) and len(running(plain)) == 2)
    assert await sandbox.wait("agent") == ProcessEnd(-9, "deadline")
    assert running(detached) == running(plain) == []


async def test_what_an_agent_leaves_behind_is_killed_when_it_ends(sandbox: LocalSandbox) -> None:
    detached, plain = a_sleep(), a_sleep()
    script = f'{sys.executable} -c "$DETACH" sleep {detached}; sleep {plain} & echo done'
    assert (await sandbox.exec(script, env={"DETACH": DETACH}, timeout_s=30)).stdout == b"done\n"
    assert running(detached) == running(plain) == []


async def test_exec_reports_a_timeout_and_truncation(sandbox: LocalSandbox) -> None:
    late = await sandbox.exec("echo early; sleep 1000", timeout_s=0.3)
    assert (late.timed_out, late.exit_code, late.stdout) == (True, -9, b"early\n")
    long = await sandbox.exec(("seq", "100"), timeout_s=30, max_output_bytes=7)
    assert (long.truncated, long.exit_code, long.stdout) == (True, 0, b"99\n100\n")
    assert not (await sandbox.exec("true", timeout_s=30)).truncated
    assert names_in(f"{sandbox.ref.handle}/control") == []


async def test_a_flood_of_output_ends_at_the_cap(tmp_path: Path) -> None:
    async with LocalBackend(LocalSettings(root=str(tmp_path / "s"), max_file_bytes=1 << 20)) as backend:
        sandbox = await backend.create(LABELS)
        await sandbox.start("agent", Command(("yes",)), deadline_s=30)
        assert await sandbox.wait("agent") == ProcessEnd(-signal.SIGXFSZ, "exited")
        assert len((await sandbox.output("agent", 10 << 20))[0]) == 1 << 20
        await sandbox.destroy()


async def test_only_one_of_twenty_concurrent_starts_runs_the_agent(
    backend: LocalBackend, sandbox: LocalSandbox
) -> None:
    opened = [await backend.open(sandbox.ref) for _ in range(20)]
    async with asyncio.TaskGroup() as group:
        starts = [
            group.create_task(other.start("agent", sh(f"echo {number} >>runs"), deadline_s=30))
            for number, other in enumerate(opened)
        ]
    winners = [number for number, start in enumerate(starts) if start.result()]
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(other.wait("agent")) for other in opened]
    assert {wait.result() for wait in waits} == {ProcessEnd(0, "exited")}
    assert await sandbox.read_file("runs", 100) == b"%d\n" % winners[0]
    assert len(winners) == 1


OTHER_WORKER = """
import asyncio, sys
from rollyard.harnesses.harness import Command
from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.sandboxes.local import LocalBackend, LocalSettings

async def main(root, place, handle, script):
    async with LocalBackend(LocalSettings(root=root)) as backend:
        sandbox = await backend.open(SandboxRef(backend="local", place=place, handle=handle))
        print(await sandbox.start("agent", Command(("sh", "-c", script)), deadline_s=60), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_agent_outlives_its_worker_and_the_next_worker_attaches(
    backend: LocalBackend, sandbox: LocalSandbox
) -> None:
    script = "echo run >>runs; while [ ! -e go ]; do sleep 0.02; done; exit 7"
    ref = sandbox.ref
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OTHER_WORKER, str(backend.root), ref.place, ref.handle, script,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"True\n"
    worker.kill()
    await worker.wait()
    assert not await sandbox.start("agent", sh(script), deadline_s=60)
    waiting = asyncio.create_task(sandbox.wait("agent"))
    await sandbox.put_files({"go": ""})
    assert await waiting == ProcessEnd(7, "exited")
    assert await sandbox.read_file("runs", 100) == b"run\n"


def shim_of(sandbox: LocalSandbox, name: str) -> int:
    """Pid of the shim of a process: its parent."""
    pid = (Path(sandbox.ref.handle) / "control" / name / "pid").read_text().split()[0]
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.mark.parametrize("attached", [False, True])
async def test_a_killed_shim_is_noticed_and_its_agent_killed(
    backend: LocalBackend, sandbox: LocalSandbox, attached: bool
) -> None:
    nap = a_sleep()
    await sandbox.start("agent", sh(f"setsid sleep {nap} & sleep {nap}"), deadline_s=60)
    await until(lambda: len(running(nap)) == 2)
    waiter = await backend.open(sandbox.ref) if attached else sandbox
    waiting = asyncio.create_task(waiter.wait("agent"))
    os.kill(shim_of(sandbox, "agent"), signal.SIGKILL)
    assert await waiting == ProcessEnd(None, "lost")
    assert running(nap) == []
    assert not await sandbox.start("agent", sh("true"), deadline_s=60)


async def test_a_process_that_was_claimed_and_never_ran_is_lost(sandbox: LocalSandbox) -> None:
    claim = Path(sandbox.ref.handle) / "control" / "agent"
    claim.mkdir()
    (claim / "started").write_text("")
    assert not await sandbox.start("agent", sh("true"), deadline_s=60)
    assert await sandbox.wait("agent") == ProcessEnd(None, "lost")


async def test_an_unrenewed_lease_ends_agents_without_any_worker(tmp_path: Path) -> None:
    nap = a_sleep()
    settings = LocalSettings(root=str(tmp_path / "s"), lease_s=0.3)
    async with LocalBackend(settings) as backend:
        sandbox = await backend.create(LABELS)
        await sandbox.start("agent", sh(f"setsid sleep {nap} & sleep {nap}"), deadline_s=60)
        await until(lambda: len(running(nap)) == 2)
    await until(lambda: not running(nap))
    async with LocalBackend(settings) as backend:
        found = await backend.open(sandbox.ref)
        assert await found.wait("agent") == ProcessEnd(-9, "lease")
        await found.destroy()


async def test_a_renewed_lease_lets_an_agent_live(tmp_path: Path) -> None:
    async with LocalBackend(LocalSettings(root=str(tmp_path / "s"), lease_s=0.5)) as backend:

        async def renew() -> None:
            while True:
                await backend.renew_lease()
                await asyncio.sleep(0.05)

        renewing = asyncio.create_task(renew())
        sandbox = await backend.create(LABELS)
        await sandbox.start("agent", sh("sleep 2"), deadline_s=60)
        assert await sandbox.wait("agent") == ProcessEnd(0, "exited")
        renewing.cancel()
        await sandbox.destroy()


async def test_kill_ends_everything_and_may_be_repeated(sandbox: LocalSandbox) -> None:
    nap = a_sleep()
    await sandbox.kill("agent")
    await sandbox.start("agent", sh(f"setsid sleep {nap} & sleep {nap}"), deadline_s=60)
    await sandbox.kill("agent")
    await sandbox.kill("agent")
    assert await sandbox.wait("agent") == ProcessEnd(-9, "killed")
    assert running(nap) == []


async def test_destroy_kills_removes_and_may_be_repeated(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    nap = a_sleep()
    await sandbox.put_files({"locked/in/file": "x"})
    (Path(sandbox.workdir) / "locked").chmod(0)
    await sandbox.start("agent", sh(f"setsid sleep {nap} & sleep {nap}"), deadline_s=60)
    await until(lambda: len(running(nap)) == 2)
    other = await backend.open(sandbox.ref)
    async with asyncio.TaskGroup() as group:
        group.create_task(sandbox.destroy())
        group.create_task(other.destroy())
    await sandbox.destroy()
    assert running(nap) == []
    assert names_in(backend.root) == ["lease"]
    with pytest.raises(SandboxError):
        await sandbox.start("late", sh("true"), deadline_s=60)
    with pytest.raises(SandboxError):
        await sandbox.put_files({"a": ""})


async def test_paths_that_leave_are_refused(sandbox: LocalSandbox, tmp_path: Path) -> None:
    for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a/", "a\0b"):
        with pytest.raises(SandboxError) as refused:
            await sandbox.put_files({path: ""})
        assert repr(path) in str(refused.value)
    assert check_path("a//b/./../c") == "a/c"
    outside = tmp_path / "outside"
    outside.mkdir()
    (Path(sandbox.workdir) / "link").symlink_to(outside)
    (Path(sandbox.workdir) / "file").symlink_to(outside / "target")
    with pytest.raises(SandboxError, match="through a link"):
        await sandbox.put_files({"link/deep/x": ""})
    with pytest.raises(SandboxError, match="leaves the sandbox"):
        await sandbox.read_file("link", 10)
    await sandbox.put_files({"file": "mine"})
    assert names_in(outside) == []
    assert await sandbox.read_file("file", 10) == b"mine"


async def test_files_are_written_and_read(sandbox: LocalSandbox) -> None:
    await sandbox.put_files({"src/a.py": "x = 'ä'\n", "b": b"\xff"})
    await sandbox.put_files({"b": b"2"})
    await sandbox.put_files({".config/c": "home"}, base="home")
    assert (await sandbox.exec(("cat", "src/a.py", "b"), timeout_s=30)).stdout == "x = 'ä'\n2".encode()
    assert await sandbox.read_file(f"{sandbox.home}/.config/c", 2) == b"ho"
    os.mkfifo(Path(sandbox.workdir) / "pipe")
    for missing in ("none", "b/c", "pipe", "src"):
        assert await sandbox.read_file(missing, 10) is None


async def test_sandboxes_are_listed_with_their_labels(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    bare = backend.root / "r9.2.0123456789abcdef"
    bare.mkdir()
    half_removed = await backend.create(LABELS)
    Path(half_removed.ref.handle).rename(half_removed.ref.handle + ".gone")
    owned = {ref.handle: labels for ref, labels in await backend.list_owned()}
    assert owned.pop(sandbox.ref.handle) == owned.pop(half_removed.ref.handle) == LABELS
    assert (owned[str(bare)].rollout_id, owned[str(bare)].attempt) == ("r9", 2)
    await half_removed.destroy()
    assert not Path(half_removed.ref.handle + ".gone").exists()


async def test_a_sandbox_of_another_place_or_folder_is_refused(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    assert backend.reaches(sandbox.ref.place)
    with pytest.raises(SandboxError, match="is at local-elsewhere"):
        await backend.open(SandboxRef(backend="local", place="local-elsewhere", handle=sandbox.ref.handle))
    for handle in ("/etc", "r1.1.0123456789abcdef", f"{backend.root}/x"):
        with pytest.raises(SandboxError, match="is no local sandbox"):
            await backend.open(SandboxRef(backend="local", place=backend.place, handle=handle))


async def test_a_command_that_cannot_be_started_says_why(sandbox: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match="cannot be started"):
        await sandbox.start("a", Command(("echo", "a\0b")), deadline_s=60)
    with pytest.raises(SandboxError, match="128 KiB"):
        await sandbox.start("b", Command(("echo", "x" * 200_000)), deadline_s=60)
    with pytest.raises(SandboxError, match="names no process"):
        await sandbox.start("../x", Command(("true",)), deadline_s=60)


def test_backends_are_found_by_name_and_path(tmp_path: Path) -> None:
    assert open_backend("local", {"root": str(tmp_path)}).name == "local"
    assert open_backend("none").reaches("any")
    assert open_backend("rollyard.stages.sandboxes.none:NoneBackend").name == "none"
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        open_backend("locl")
    with pytest.raises(ConfigError, match="cannot be loaded from nowhere:X"):
        open_backend("nowhere:X")
    with pytest.raises(ConfigError, match="lease"):
        open_backend("local", {"root": "/x", "lease": 3})
    with pytest.raises(ConfigError, match="unknown setting 'a'"):
        open_backend("none", {"a": 1})
