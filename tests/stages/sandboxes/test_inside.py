"""inside.sh and its client, through processes of this machine, with each shell that an image may have as `sh`."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import subprocess
import tarfile
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import ProcessEnd
from rollyard.stages.sandboxes.inside import Inside, InsideSandbox, StreamName
from rollyard.stages.sandboxes.inside_archive import checked_archive, is_excluded
from rollyard.stages.sandboxes.inside_channel import Channel, ChannelClosed, call_text
from rollyard.stages.sandboxes.inside_command import exit_code, script_text, variables

SHELLS = ["dash", "busybox", "bash"]
TOOLS = (
    "base64 cat chmod cut dd env find grep head id kill ln ls mkdir mv printf ps rm seq setsid sleep sort tail tar tr "
    "true wc yes"
)
DETACH = "env -i setsid sh -c 'sleep {nap} & sleep {nap} & wait' >/dev/null 2>&1 &"


class ProcessStream:
    """A process of this machine as a `Stream`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._pieces: asyncio.Queue[tuple[StreamName, bytes] | None] = asyncio.Queue()
        self._pumps = [asyncio.create_task(self._pump("stdout")), asyncio.create_task(self._pump("stderr"))]

    async def _pump(self, name: StreamName) -> None:
        reader = getattr(self.process, name)
        while data := await reader.read(1 << 16):
            self._pieces.put_nowait((name, data))
        self._pieces.put_nowait(None)

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except OSError as error:
            raise SandboxError(str(error)) from error

    async def read(self) -> tuple[StreamName, bytes] | None:
        for _ in self._pumps:
            if (piece := await self._pieces.get()) is not None:
                return piece
        self._pieces.put_nowait(None)
        self._pieces.put_nowait(None)
        return None

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


class ProcessEntrance:
    """Runs programs on this machine, in an environment and with the programs of an image."""

    def __init__(self, programs: Path, *, binary: bool) -> None:
        self.binary = binary
        self.programs = programs
        self.streams: list[ProcessStream] = []

    async def open(self, argv: Sequence[str], *, user: str, tty: bool = False) -> ProcessStream:
        assert not tty
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": str(self.programs)},
            start_new_session=True,
            cwd="/",
        )
        self.streams.append(ProcessStream(process))
        return self.streams[-1]

    async def end(self) -> None:
        for stream in self.streams:
            await stream.close()
            if stream.process.returncode is None:
                stream.process.kill()
            await stream.process.wait()
            await asyncio.wait(stream._pumps)


def programs_of(shell: str, folder: Path) -> Path:
    """A folder that holds what an image has, with `shell` as its sh."""
    folder.mkdir()
    tools = TOOLS.split() if shell != "bash" else ["bash", *TOOLS.split()]
    for tool in ["sh", *tools]:
        source = shell if tool == "sh" else ("busybox" if shell == "busybox" else tool)
        if found := shutil.which(source):
            (folder / tool).symlink_to(found)
    return folder


@pytest.fixture(params=SHELLS)
async def entrance(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ProcessEntrance]:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} on this machine")
    entrance = ProcessEntrance(programs_of(request.param, tmp_path / "bin"), binary=True)
    yield entrance
    await entrance.end()


def inside(folder: Path, **more: object) -> Inside:
    given = {"handle": uuid.uuid4().hex, "workdir": f"{folder}/work", "home": f"{folder}/home"}
    return Inside(**(given | {"control": f"{folder}/control"} | more))  # type: ignore[arg-type]


@pytest.fixture
async def sandbox(entrance: ProcessEntrance, tmp_path: Path) -> AsyncIterator[InsideSandbox]:
    sandbox = InsideSandbox(entrance, inside(tmp_path / "a sandbox"))
    yield sandbox
    await sandbox.close_channels()


def sh(script: str, **env: str) -> Command:
    return Command(("sh", "-c", script), env)


def a_sleep() -> str:
    """An argument of `sleep` that no other process has."""
    return f"1000.{uuid.uuid4().int % 10**12:012d}"


def running(nap: str) -> list[int]:
    """Processes that are `sleep nap`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().endswith(f"sleep\0{nap}\0".encode()):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


async def test_a_command_is_run_with_both_outputs_and_its_exit_code(sandbox: InsideSandbox) -> None:
    done = await sandbox.exec("printf out; printf err >&2; exit 3", timeout_s=30)
    assert (done.exit_code, done.stdout, done.stderr, done.timed_out, done.truncated) == (
        3,
        b"out",
        b"err",
        False,
        False,
    )
    assert (
        await sandbox.exec(("cat",), stdin=b"\0\xff\n" * 40_000, timeout_s=30, max_output_bytes=5)
    ).stdout == b"\xff\n\0\xff\n"
    assert (await sandbox.exec("kill -s TERM $$", timeout_s=30)).exit_code == -signal.SIGTERM
    assert (await sandbox.exec("kill -s INT $$; exit 9", timeout_s=30)).exit_code == -signal.SIGINT
    missing = await sandbox.exec(("no-such-program",), timeout_s=30)
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr


async def test_a_command_gets_directory_and_environment_as_they_are(sandbox: InsideSandbox) -> None:
    odd = "a b\n'\"$x`\\ é"
    done = await sandbox.exec('printf "%s|%s|" "$ODD" "$HOME"; pwd', env={"ODD": odd}, timeout_s=30)
    assert done.stdout.decode() == f"{odd}|{sandbox.home}|{sandbox.workdir}\n"
    await sandbox.put_files({"sub/x": ""})
    assert (await sandbox.exec("ls", cwd="sub", timeout_s=30)).stdout == b"x\n"
    assert (await sandbox.exec("pwd", cwd="/", timeout_s=30)).stdout == b"/\n"
    assert (await sandbox.exec("true", cwd="no-such", timeout_s=30)).exit_code == 126
    argument = "é\n" * 3000
    assert (await sandbox.exec(("printf", "%s", argument), timeout_s=30)).stdout.decode() == argument


@pytest.mark.parametrize("bad", ["a\0b", "x" * 200_000])
async def test_what_no_program_can_be_given_is_refused(sandbox: InsideSandbox, bad: str) -> None:
    with pytest.raises(SandboxError, match="no program can be given"):
        await sandbox.exec(("echo", bad), timeout_s=30)
    with pytest.raises(SandboxError, match="no program can be given"):
        await sandbox.start("agent", sh("true", A=bad), deadline_s=30)


async def test_a_time_limit_kills_all_that_a_command_started(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    done = await sandbox.exec(f"trap '' TERM; sleep {nap} & {DETACH.format(nap=nap)} sleep {nap}; :", timeout_s=0.5)
    assert done.timed_out
    assert running(nap) == []


async def test_what_a_command_leaves_running_is_killed_at_its_end(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    done = await sandbox.exec(f"sleep {nap} & {DETACH.format(nap=nap)} sleep 0.2; echo done", timeout_s=30)
    assert (done.exit_code, done.stdout) == (0, b"done\n")
    assert running(nap) == []


async def test_a_cancelled_command_is_killed(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    task = asyncio.create_task(sandbox.exec(f"sleep {nap}", timeout_s=60))
    await until(lambda: running(nap))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(nap) == []
    assert (await sandbox.exec("echo on", timeout_s=30)).stdout == b"on\n"


async def test_only_the_end_of_a_flood_is_kept(sandbox: InsideSandbox) -> None:
    done = await sandbox.exec(
        "yes | head -c 20000000; yes | head -c 5000000 >&2; echo end", timeout_s=60, max_output_bytes=1000
    )
    assert (len(done.stdout), done.stdout[-4:], done.truncated) == (1000, b"end\n", True)


async def test_files_are_put_and_read(sandbox: InsideSandbox, tmp_path: Path) -> None:
    big = os.urandom(300_000)
    await sandbox.put_files({"a/b": big, "é ' file": "é", "empty": b""})
    assert await sandbox.read_file("a/b", 1 << 20) == big
    assert await sandbox.read_file("a/b", 3) == big[:3]
    assert await sandbox.read_file("é ' file", 9) == "é".encode()
    assert await sandbox.read_file("empty", 9) == b""
    assert await sandbox.read_file("none", 9) is None
    assert await sandbox.read_file("a", 9) is None
    await sandbox.put_files({"a/b": b"new", ".rc": b"rc"})
    await sandbox.put_files({".rc": b"of home"}, base="home")
    assert await sandbox.read_file("a/b", 9) == b"new"
    assert await sandbox.read_file(f"{sandbox.home}/.rc", 9) == b"of home"
    await sandbox.exec(f"ln -s {tmp_path} out", timeout_s=30)
    with pytest.raises(SandboxError, match="out/x"):
        await sandbox.put_files({"out/x": b""})
    with pytest.raises(SandboxError, match="leaves"):
        await sandbox.put_files({"../x": b""})
    # The channel whose bytes were not taken is not used again.
    assert (await sandbox.exec("echo on", timeout_s=30)).stdout == b"on\n"


def packed(*entries: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in entries:
            entry.size = len(content) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o750
    return made


async def test_trees_go_in_and_out(sandbox: InsideSandbox) -> None:
    archive = packed(entry("top/file"), entry("top/link", tarfile.SYMTYPE, "/etc"), content=b"x" * 9)
    await sandbox.put_tree(archive, "there")
    assert await sandbox.read_file("there/top/file", 99) == b"x" * 9
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_tree("there/top"))) as tar:
        assert sorted(tar.getnames()) == ["top", "top/file", "top/link"]
        assert tar.getmember("top/file").mode == 0o750
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_tree("there/.", exclude=("link",)))) as tar:
        assert sorted(name.removeprefix("./") for name in tar.getnames()) == [".", "top", "top/file"]
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_tree("there/top/file"))) as tar:
        assert tar.getnames() == ["file"]
    with pytest.raises(SandboxError, match="there is no 'none'"):
        await sandbox.get_tree("none")
    await sandbox.put_files({"there/large": bytes(1 << 20)})
    with pytest.raises(SandboxError, match="over 100000 bytes"):
        await sandbox.get_tree("there", max_bytes=100_000)
    assert (await sandbox.exec("echo on", timeout_s=30)).stdout == b"on\n"


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../x")],
        [entry("/x")],
        [entry("a/../../x")],
        [entry("l", tarfile.SYMTYPE, "/tmp"), entry("l/x")],
        [entry("l", tarfile.SYMTYPE, "/tmp"), entry("h", tarfile.LNKTYPE, "l/x")],
        [entry("h", tarfile.LNKTYPE, "../x")],
        [entry("d", tarfile.CHRTYPE)],
        [entry("p", tarfile.FIFOTYPE)],
    ],
)
def test_an_archive_that_would_leave_its_folder_is_refused(entries: list[tarfile.TarInfo]) -> None:
    with pytest.raises(SandboxError, match="archive's member"):
        checked_archive(packed(*entries))


@pytest.mark.parametrize(
    ("name", "pattern", "excluded"),
    [
        ("a/b/c", "b", True),
        ("./a/b", "a", True),
        ("a/b/c", "a/b", True),
        ("a/bc", "b", False),
        ("a/x.pyc", "*.pyc", True),
        ("a/b/c", "a*c", True),
        (".", "a", False),
        ("a/.git/x", ".git/", True),
    ],
)
def test_patterns_exclude_as_tar_does(name: str, pattern: str, excluded: bool) -> None:
    assert is_excluded(name, pattern) is excluded


def test_what_is_no_archive_is_refused() -> None:
    for data in (b"x" * 1000, b"\x1f\x8bxxxx"):
        with pytest.raises(SandboxError, match="cannot be read"):
            checked_archive(data)


async def test_a_process_is_started_once_and_found_by_others(
    sandbox: InsideSandbox, entrance: ProcessEntrance, tmp_path: Path
) -> None:
    command = Command(("sh", "-c", "cat; echo err >&2; echo x >>count; sleep 0.5; exit 4"), {"A": "b"}, b"in \0")
    others = [InsideSandbox(entrance, sandbox._inside) for _ in range(3)]
    results = await asyncio.gather(*(other.start("agent", command, deadline_s=30) for other in others))
    assert sorted(results) == [False, False, True]
    assert not await sandbox.start("agent", command, deadline_s=30)
    assert await asyncio.gather(*(other.wait("agent") for other in others)) == [ProcessEnd(4, "exited")] * 3
    assert await sandbox.wait("agent") == ProcessEnd(4, "exited")
    assert await sandbox.output("agent", 99) == (b"in \0", b"err\n")
    assert await sandbox.output("agent", 2) == (b" \0", b"r\n")
    assert await sandbox.read_file("count", 99) == b"x\n"
    assert await sandbox.output("never", 9) == (b"", b"")
    assert await sandbox.wait("never") == ProcessEnd(None, "lost")
    for other in others:
        await other.close_channels()


async def test_a_process_ends_at_its_deadline_with_all_that_it_started(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    await sandbox.start("agent", sh(f"trap '' TERM; {DETACH.format(nap=nap)} sleep {nap}; sleep {nap}"), deadline_s=1)
    await sandbox.close_channels()  # nobody is there
    await until(lambda: running(nap))
    await until(lambda: not running(nap))
    assert await sandbox.wait("agent") == ProcessEnd(-9, "deadline")


async def test_a_killed_process_is_dead_with_all_that_it_started(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    await sandbox.kill("agent")  # nothing is there
    await sandbox.start("agent", sh(f"{DETACH.format(nap=nap)} sleep {nap}"), deadline_s=60)
    await until(lambda: len(running(nap)) == 3)
    await sandbox.kill("agent")
    assert running(nap) == []
    assert await sandbox.wait("agent") == ProcessEnd(-9, "killed")
    await sandbox.kill("agent")
    assert await sandbox.wait("agent") == ProcessEnd(-9, "killed")


async def test_processes_do_not_end_one_another(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    await sandbox.start("agent", sh(f"{DETACH.format(nap=nap)} sleep {nap}"), deadline_s=60)
    await until(lambda: len(running(nap)) == 3)
    await sandbox.start("other", sh("true"), deadline_s=60)
    assert await sandbox.wait("other") == ProcessEnd(0, "exited")
    await sandbox.exec("true", timeout_s=30)
    await sandbox.kill("other")
    assert len(running(nap)) == 3
    await sandbox.kill("agent")


async def test_a_dead_shim_makes_a_lost_process_of_which_nothing_is_left(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    await sandbox.start("agent", sh(f"kill -9 $PPID; {DETACH.format(nap=nap)} sleep {nap}"), deadline_s=60)
    await until(lambda: running(nap))
    assert await sandbox.wait("agent") == ProcessEnd(None, "lost")
    assert running(nap) == []


async def test_a_process_whose_control_files_are_gone_is_found_by_its_mark(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    await sandbox.start("agent", sh(f"sleep 0.3; rm -rf {sandbox._inside.control!r}; sleep {nap}"), deadline_s=60)
    await until(lambda: running(nap))
    assert await sandbox.wait("agent") == ProcessEnd(None, "lost")
    assert running(nap) == []


async def test_stopped_and_ignoring_processes_end(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    await sandbox.start(
        "agent", sh(f"trap '' TERM INT HUP; sleep {nap} & sleep 0.3; kill -STOP $!; sleep {nap}"), deadline_s=60
    )
    await until(lambda: len(running(nap)) == 2)
    await sandbox.kill("agent")
    assert running(nap) == []


async def test_a_long_stdin_that_breaks_off_starts_nothing(sandbox: InsideSandbox, entrance: ProcessEntrance) -> None:
    argv = sandbox._argv(("shim", "agent", "t0", 1000, 1 << 44, 5000, *sandbox._running(None, {}), "true"))
    stream = await entrance.open(argv, user="")
    await stream.write(b"x" * 10)
    await stream.close()
    assert await stream.process.wait() != 0
    assert await sandbox.start("agent", sh("exit 5"), deadline_s=30)
    assert await sandbox.wait("agent") == ProcessEnd(5, "exited")


async def test_a_shell_keeps_directory_and_variables(sandbox: InsideSandbox) -> None:
    nap = a_sleep()
    async with await sandbox.shell(env={"A": "b"}) as shell:
        await shell.run("cd /; x=3", timeout_s=30)
        assert (await shell.run("pwd; echo $x $A", timeout_s=30)).output == b"/\n3 b\n"
        late = await shell.run(f"sleep {nap}", timeout_s=0.3)
        assert late.timed_out
        assert running(nap) == []
        await shell.run(DETACH.format(nap=nap), timeout_s=30)
        await until(lambda: running(nap))
    assert running(nap) == []


async def test_a_sandbox_that_is_entered_through_text_gives_the_same(tmp_path: Path) -> None:
    entrance = ProcessEntrance(programs_of("dash", tmp_path / "bin"), binary=False)
    sandbox = InsideSandbox(entrance, inside(tmp_path))
    data = os.urandom(100_000)
    await sandbox.put_files({"a": data})
    assert await sandbox.read_file("a", 1 << 20) == data
    assert (await sandbox.exec("cat a; cat a >&2", timeout_s=30, max_output_bytes=1 << 20)).stderr == data
    assert len(await sandbox.get_tree("a")) > len(data)
    await sandbox.start("agent", sh("cat a"), deadline_s=30)
    await sandbox.wait("agent")
    assert (await sandbox.output("agent", 1 << 20))[0] == data
    await sandbox.close_channels()
    await entrance.end()


async def test_an_image_that_lacks_a_program_is_told(tmp_path: Path) -> None:
    entrance = ProcessEntrance(programs_of("dash", tmp_path / "bin"), binary=True)
    (entrance.programs / "tar").unlink()
    sandbox = InsideSandbox(entrance, inside(tmp_path))
    with pytest.raises(SandboxError, match="the image lacks tar"):
        await sandbox.exec("true", timeout_s=30)
    await entrance.end()


async def test_a_sandbox_without_a_place_for_its_folders_is_told(tmp_path: Path) -> None:
    entrance = ProcessEntrance(programs_of("dash", tmp_path / "bin"), binary=True)
    (tmp_path / "file").write_text("")
    sandbox = InsideSandbox(entrance, inside(tmp_path, workdir=f"{tmp_path}/file/work"))
    with pytest.raises(SandboxError, match="folders cannot be made"):
        await sandbox.exec("true", timeout_s=30)
    await entrance.end()


class Scripted:
    """A stream that answers with given pieces."""

    def __init__(self, answer: Callable[[bytes], Sequence[tuple[StreamName, bytes]]]) -> None:
        self._answer = answer
        self._pieces: list[tuple[StreamName, bytes]] = []

    async def write(self, data: bytes) -> None:
        nonce = data.rpartition(b"ry_reply ")[2].split()[0]
        self._pieces += self._answer(nonce)

    async def read(self) -> tuple[StreamName, bytes] | None:
        return self._pieces.pop(0) if self._pieces else None

    async def close(self) -> None:
        self._pieces.clear()


@given(st.binary(max_size=200), st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=30), st.booleans())
def test_an_answer_is_read_whatever_it_holds_and_however_it_is_cut(
    out: bytes, err: bytes, cuts: list[int], first: bool
) -> None:
    def answer(nonce: bytes) -> list[tuple[StreamName, bytes]]:
        # Half an end in the output is no end.
        streams: list[tuple[StreamName, bytes]] = [
            ("stdout", out + b"\n" + nonce[:9] + b"\n" + nonce + b" 7 x\n"),
            ("stderr", err + b"\n" + nonce + b"\n"),
        ]
        pieces: list[tuple[StreamName, bytes]] = []
        for name, data in streams if first else reversed(streams):
            rest = data
            for cut in cuts:
                pieces.append((name, rest[:cut]))
                rest = rest[cut:]
            pieces.append((name, rest))
        return [(name, piece) for name, piece in pieces if piece]

    async def ask() -> None:
        reply = await Channel(Scripted(answer), binary=True).request("x", timeout_s=10, max_bytes=1000)
        assert reply.status == "7 x"
        assert reply.stdout.rpartition(b"\n")[0] == out
        assert reply.stderr == err

    asyncio.run(ask())


async def test_a_channel_that_broke_is_not_used_again() -> None:
    channel = Channel(Scripted(lambda nonce: [("stderr", b"sh: Cannot fork")]), binary=True)
    with pytest.raises(ChannelClosed, match="Cannot fork"):
        await channel.request("x", timeout_s=10, max_bytes=1000)
    assert not channel.usable
    with pytest.raises(ChannelClosed, match="broken"):
        await channel.request("x", timeout_s=10, max_bytes=1000)


async def test_an_answer_that_is_too_long_is_refused() -> None:
    channel = Channel(Scripted(lambda nonce: [("stdout", bytes(1 << 18))]), binary=True)
    with pytest.raises(SandboxError, match="bytes"):
        await channel.request("x", timeout_s=10, max_bytes=1000)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20), max_size=5))
def test_arguments_come_through_a_shell_unchanged(texts: list[str]) -> None:
    code = call_text("f", texts)
    script = "f() { for a; do printf '%s\\0' \"$a\"; done; }\n" + code
    found = subprocess.run(["dash", "-c", script], capture_output=True, check=True).stdout.decode()
    assert found.split("\0")[:-1] == texts


def test_variables_that_a_shell_cannot_set_are_refused() -> None:
    assert variables({"A": "b=c", "PWD": "/x", "UID": "1"}) == ["A=b=c"]
    for name in ("1A", "A-B", "", "A B", "ry_dir"):
        with pytest.raises(SandboxError, match="environment variable"):
            variables({name: "x"})


def test_a_status_above_128_is_a_signal() -> None:
    assert [exit_code(status) for status in (0, 1, 127, 128, 137, 143, 255)] == [0, 1, 127, 128, -9, -15, 255]


def test_the_program_fits_an_argument_and_has_no_comments() -> None:
    assert len(script_text()) < 20_000
    assert not any(line.lstrip().startswith("#") for line in script_text().splitlines())
