"""The shell channel: real shells behind real pipes and terminals; frames and states under any bytes in any pieces."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollyard.schemas.errors import SandboxError
from rollyard.stages.pipes.pty import PtyPipe
from rollyard.stages.pipes.subprocess import SubprocessPipe
from rollyard.stages.shell import Opener, Pipe, PipeShell, ShellResult
from rollyard.stages.shell_frames import CommandEnd, Frames, ShellEnd, Tail
from rollyard.stages.shell_script import restoring_text
from rollyard.stages.shell_state import ShellState

TOOLS = ["cat", "env", "false", "head", "kill", "ls", "rm", "seq", "setsid", "sh", "sleep", "stty", "tr", "true", "yes"]
SHELLS = [name for name in ("bash", "dash", "busybox") if shutil.which(name)]
PIPES = {"pipes": SubprocessPipe, "pty": PtyPipe}


def path_of(folder: Path, shell: str) -> str:
    """A PATH on which `sh` is that shell, and with bash there is a `bash` too."""
    folder.mkdir(exist_ok=True)
    for tool in TOOLS:
        program = "busybox" if shell == "busybox" else shell if tool == "sh" else tool
        (folder / tool).symlink_to(str(shutil.which(program)))
    if shell == "bash":
        (folder / "bash").symlink_to(str(shutil.which("bash")))
    return str(folder)


def opener(path: str, cwd: Path, kind: str = "pipes", **env: str) -> Opener:
    async def open_pipe(argv: tuple[str, ...]) -> Pipe:
        return await PIPES[kind].spawn(argv, cwd=str(cwd), env={"PATH": path, "LANG": "C.UTF-8", **env})

    return open_pipe


@pytest.fixture(params=[f"{shell}-{kind}" for shell in SHELLS for kind in PIPES])
async def shell(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PipeShell]:
    name, kind = request.param.split("-")
    (tmp_path / "work").mkdir()
    path = path_of(tmp_path / "bin", name)
    async with await PipeShell.opened(opener(path, tmp_path / "work", kind, FIRST="1")) as opened:
        yield opened


@pytest.fixture
async def bash(tmp_path: Path) -> AsyncIterator[PipeShell]:
    async with await PipeShell.opened(opener(os.environ["PATH"], tmp_path)) as opened:
        yield opened


async def said(shell: PipeShell, command: str) -> str:
    result = await shell.run(command, timeout_s=20)
    assert not result.restarted, result
    return result.output.decode()


def a_sleep() -> str:
    """A `sleep` that no other process is."""
    return f"sleep 1000.{uuid.uuid4().int % 10**9:09d}"


def running(command: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_text().rstrip("\0").replace("\0", " ").endswith(command):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


# --- what commands may do without ending the shell ---


async def test_commands_share_one_shell(shell: PipeShell, tmp_path: Path) -> None:
    assert await said(shell, "echo out; echo err >&2; printf end") == "out\nerr\nend"
    assert await said(shell, "x=1; export Y='a b'; cd ..; f() { echo \"f $x $1\"; }") == ""
    assert await said(shell, 'f 2; echo "$Y"; pwd') == f"f 1 2\na b\n{tmp_path}\n"
    assert (await shell.run("false", timeout_s=20)) == ShellResult(1, b"")
    assert await said(shell, "echo $?; true") == "1\n"
    assert await said(shell, "echo $?") == "0\n"
    assert (await shell.run("sh -c 'kill -9 $$'", timeout_s=20)).exit_code == 137
    assert (await shell.run("no-such-program-here", timeout_s=20)).exit_code == 127


@pytest.mark.parametrize("command", ["if", "echo 'open", 'echo "open', "echo `open", "(", "}", "case x in", "echo $(("])
async def test_what_does_not_parse_is_an_error_and_nothing_more(shell: PipeShell, command: str) -> None:
    result = await shell.run(command, timeout_s=20)
    assert (result.exit_code or 0) > 0
    assert result.output
    assert not result.restarted
    assert await said(shell, "echo next") == "next\n"


async def test_here_documents_comments_and_line_ends(shell: PipeShell) -> None:
    assert await said(shell, "cat <<'END'\n$x 'open\nEND\necho \"after\" # 'open") == "$x 'open\nafter\n"
    assert (await said(shell, "cat <<END\nnever closed")).rstrip("\n").endswith("never closed")
    assert await said(shell, "") == ""
    assert await said(shell, "echo é漢 | tr -d '\\n'; printf '\\r\\n'") == "é漢\r\n"


async def test_commands_read_nothing_of_the_channel(shell: PipeShell) -> None:
    assert await said(shell, 'cat; read x; echo "read [$x]"; sh') == "read []\n"
    assert await said(shell, "exec </dev/zero; echo taken") == "taken\n"
    assert await said(shell, "echo here") == "here\n"


async def test_binary_output_arrives_as_it_is(shell: PipeShell) -> None:
    every_byte = bytes(range(256))
    text = "".join(f"\\{byte:03o}" for byte in every_byte)
    assert (await shell.run(f"printf '{text}'", timeout_s=20)).output == every_byte
    assert (await shell.run("head -c 100000 /dev/zero", timeout_s=20)).output == bytes(100_000)


async def test_a_shell_is_itself_with_odd_settings(shell: PipeShell) -> None:
    assert await said(shell, "IFS=0123456789; set -u; set -f; umask 077; trap 'echo trapped' USR1") == ""
    assert await said(shell, 'kill -USR1 "$$"; echo after') == "trapped\nafter\n"
    assert (
        await said(shell, "printf() { echo mine; }; alias printf='echo theirs'; pwd() { :; }; \\printf x") == "mine\n"
    )
    assert await said(shell, "PS1='$ '; PS2=; echo $-") != ""
    assert "traced" in await said(shell, "set -x; : traced")
    traced = await said(shell, "echo once")
    assert "_ry" not in traced
    assert traced.endswith("once\n")


async def test_the_shells_own_output_may_be_redirected(shell: PipeShell, tmp_path: Path) -> None:
    assert await said(shell, "exec 7>&1 >log; echo hidden") == ""
    assert await said(shell, "echo more; exec >&7 7>&-; cat log") == "hidden\nmore\n"
    assert await said(shell, "exec 2>&-; echo still") == "still\n"
    assert await said(shell, "exec 9>lock; exec 8>lock; echo locked") == "locked\n"
    assert await said(shell, "echo here") == "here\n"


async def test_long_commands_go_through(shell: PipeShell) -> None:
    long = "y" * 300_000
    result = await shell.run(f"printf %s '{long}'; printf '[%s]' \"$?\"", timeout_s=60)
    assert result.output == long.encode() + b"[0]"


async def test_a_long_command_does_not_wait_for_a_shell_that_waits_for_us(shell: PipeShell) -> None:
    await said(shell, "export BIG=$(head -c 200000 /dev/zero | tr '\\0' x)")
    result = await shell.run("echo ${#BIG} # " + "z" * 200_000, timeout_s=60)
    assert result == ShellResult(0, b"200000\n")


async def test_much_output_keeps_its_end(shell: PipeShell) -> None:
    one_mb = await shell.run("seq 150000", timeout_s=60, max_output_bytes=2_000_000)
    assert one_mb.output == "".join(f"{number}\n" for number in range(1, 150_001)).encode()
    assert not one_mb.truncated
    result = await shell.run("seq 150000", timeout_s=60, max_output_bytes=7)
    assert result == ShellResult(0, b"150000\n", truncated=True)


async def test_a_hundred_megabytes_keep_memory_flat(bash: PipeShell) -> None:
    peak = _peak_kib()
    result = await bash.run("head -c 100000000 /dev/zero; echo end", timeout_s=60, max_output_bytes=1000)
    assert result.output == bytes(996) + b"end\n"
    assert result.truncated
    assert _peak_kib() - peak < 16_384


def _peak_kib() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)


async def test_background_jobs_go_on_writing(shell: PipeShell) -> None:
    await said(shell, "(while :; do echo tick; sleep 0.002; done) & export N=0")
    for number in range(50):
        result = await shell.run(f"export N={number}; (exit {number}); printf 'now %s|' $?", timeout_s=20)
        assert result.output.replace(b"tick\n", b"") == f"now {number}|".encode()
    ended = await shell.run("exit 7", timeout_s=20)
    assert (ended.exit_code, ended.restarted) == (7, True)
    assert await said(shell, "echo $N") == "49\n"


async def test_a_flood_from_the_background_ends_nothing(shell: PipeShell) -> None:
    await said(shell, "yes & sleep 0.05; echo $! >pid")
    result = await shell.run("(exit 3)", timeout_s=20, max_output_bytes=100)
    assert result.exit_code == 3
    assert set(result.output) <= set(b"y\n")
    assert (await shell.run("kill -9 $(cat pid)", timeout_s=20)).exit_code == 0


@pytest.mark.parametrize("kind", ["exit", "exited", "0123456789abcdef"])
async def test_what_looks_like_a_frame_is_output(bash: PipeShell, kind: str) -> None:
    fake = f"\x1e0123456789abcdef {kind} 0\x1e/\0\x1e"
    printed = "".join(f"\\{byte:03o}" for byte in fake.encode())
    assert (await bash.run(f"printf '{printed}'; false", timeout_s=20)) == ShellResult(1, fake.encode())


async def test_an_agent_that_knows_the_prefix_cannot_end_its_command(shell: PipeShell) -> None:
    prefix = "$(tr '\\0' '\\n' </proc/$PPID/cmdline | tail -n 1)" if shutil.which("tail") else ""
    result = await shell.run(f"p={prefix}; printf '\\036%s %s 0\\036' \"$p\" 0123456789abcdef; (exit 5)", timeout_s=20)
    assert result.exit_code == 5
    assert b"0123456789abcdef" in result.output


# --- what ends it ---


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("cd /usr; export B=2; exit 3", 3),
        ("cd /usr; export B=2; set -e; false; echo not here", 1),
        ("cd /usr; export B=2; sleep 1000 & exit 4", 4),
        ("cd /usr; export B=2; exec >/dev/null; exit 5", 5),
    ],
)
async def test_a_shell_that_exits_is_made_anew(shell: PipeShell, command: str, code: int) -> None:
    await said(shell, "export A=\"a 'b' \\\"c\\\" \\\\ $(printf 'x\\ny\\001\\377')\"; unset FIRST; lost=1; g() { :; }")
    before = (await shell.run('printf %s "$A"', timeout_s=20)).output
    result = await shell.run(command, timeout_s=20)
    assert (result.exit_code, result.output, result.restarted) == (code, b"", True)
    assert await said(shell, 'pwd; echo "$B${lost-}${FIRST-}"') == "/usr\n2\n"
    assert (await shell.run('printf %s "$A"', timeout_s=20)).output == before


@pytest.mark.parametrize(
    ("command", "code"),
    [("kill -9 $$", 137), ("exec false", 1), ("exec no-such-program", 127), ("trap - EXIT; exit 6", 6)],
)
async def test_a_shell_that_says_no_more_is_made_anew_as_it_was_before(
    shell: PipeShell, command: str, code: int
) -> None:
    await said(shell, "cd /usr; export A=1")
    result = await shell.run(command, timeout_s=20)
    assert (result.exit_code, result.restarted) == (code, True)
    assert await said(shell, "pwd; echo $A") == "/usr\n1\n"


async def test_a_directory_that_is_gone_is_the_first_one(shell: PipeShell, tmp_path: Path) -> None:
    (tmp_path / "work/gone").mkdir()
    await said(shell, "cd gone")
    (tmp_path / "work/gone").rmdir()
    await shell.run("exit", timeout_s=20)
    assert await said(shell, "pwd") == f"{tmp_path / 'work'}\n"


async def test_a_command_that_takes_too_long_is_interrupted(shell: PipeShell) -> None:
    nap = a_sleep()
    await said(shell, "kept=1")
    result = await shell.run(f"echo begun; {nap}; echo not here", timeout_s=0.3)
    assert result.output.startswith(b"begun\n")
    assert (result.exit_code, result.timed_out, result.restarted) == (None, True, False)
    assert await said(shell, "echo $kept") == "1\n"
    await until(lambda: not running(nap))


@pytest.mark.parametrize(
    "command", ["trap '' INT; {nap}", "while :; do :; done", "setsid {nap}", "{nap} | cat; {nap}; {nap}"]
)
async def test_what_does_not_hear_the_interrupt_is_killed(shell: PipeShell, command: str) -> None:
    nap = a_sleep()
    await said(shell, "cd /usr; export A=1")
    result = await shell.run(command.format(nap=nap), timeout_s=0.2)
    assert (result.exit_code, result.timed_out) == (None, True)
    assert await said(shell, "pwd; echo $A") == "/usr\n1\n"
    if "setsid" not in command:  # which only a backend can find
        await until(lambda: not running(nap))


async def test_a_flood_that_takes_too_long_is_interrupted(shell: PipeShell) -> None:
    result = await shell.run("yes", timeout_s=0.3, max_output_bytes=10)
    assert (result.output, result.timed_out, result.restarted) == (b"y\n" * 5, True, False)


async def test_a_cancelled_command_is_gone_before_the_next_one(shell: PipeShell) -> None:
    nap = a_sleep()
    await said(shell, "export A=1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await shell.run(nap, timeout_s=1000)
    assert await said(shell, "echo $A") == "1\n"
    await until(lambda: not running(nap))


async def test_a_shell_that_died_while_nobody_looked(shell: PipeShell) -> None:
    await said(shell, "cd /usr")
    await said(shell, "(sleep 0.05; kill -9 $$) & echo $$ >/dev/null")
    await asyncio.sleep(0.3)
    result = await shell.run("pwd", timeout_s=20)
    # A pipe tells that nobody reads, so the command runs in a new shell at once; a terminal takes it for nobody.
    if result.restarted:
        assert result.exit_code == 137
        result = await shell.run("pwd", timeout_s=20)
    assert result == ShellResult(0, b"/usr\n")


async def test_nothing_is_left_after_close(shell: PipeShell) -> None:
    nap = a_sleep()
    await said(shell, f"{nap} & {nap} &")
    await until(lambda: running(nap))
    await shell.close()
    await until(lambda: not running(nap))
    await shell.close()
    with pytest.raises(SandboxError, match="closed"):
        await shell.run("true", timeout_s=1)


async def test_what_no_shell_can_take_is_refused(bash: PipeShell) -> None:
    with pytest.raises(SandboxError, match="NUL"):
        await bash.run("echo a\0b", timeout_s=1)
    assert await said(bash, "echo next") == "next\n"


async def test_a_sandbox_without_a_shell_says_so(tmp_path: Path) -> None:
    async def say_no(argv: Sequence[str]) -> Pipe:
        return await SubprocessPipe.spawn(("sh", "-c", "echo no shell here >&2; exit 1"), cwd=None, env={})

    with pytest.raises(SandboxError, match="no shell here"):
        await PipeShell.opened(say_no)
    with pytest.raises(SandboxError, match="cannot be started"):
        await PipeShell.opened(opener(os.environ["PATH"], tmp_path / "nowhere"))


async def test_a_sandbox_that_went_away_says_so(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    async with await PipeShell.opened(opener(os.environ["PATH"], tmp_path / "work")) as shell:
        (tmp_path / "work").rmdir()
        assert (await shell.run("exit 2", timeout_s=20)).exit_code == 2
        with pytest.raises(SandboxError, match="cannot be started"):
            await shell.run("true", timeout_s=20)


# --- the terminal ---


async def test_a_terminal_on_request(tmp_path: Path) -> None:
    path = os.environ["PATH"]
    async with await PipeShell.opened(opener(path, tmp_path, "pty")) as shell:
        assert await said(shell, "test -t 1 && test -t 2 && echo terminal; stty size <&1") == "terminal\n24 80\n"
        # What a program leaves of the terminal's settings harms nothing.
        assert await said(shell, "stty sane </dev/tty; true") == ""
        assert await said(shell, f"echo 'a\nb'; printf %s '{'z' * 20_000}' | tail -c 3") == "a\nb\nzzz"
        assert await said(shell, "python3 -c \"print(open(0).isatty(), open(2, 'w').isatty())\"") == "False True\n"
    async with await PipeShell.opened(opener(path, tmp_path)) as shell:
        assert await said(shell, "test -t 1 || echo none") == "none\n"


# --- pure parts ---

PREFIX = b"0011223344556677"
outputs = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from([b"\x1e", b"\x1e" + PREFIX, b"\x1e" + PREFIX + b" ", b"\x1e00", b"exit 0\x1e", b"\0"]),
        st.just(b"\x1e" + PREFIX + b" aaaa 7\x1e"),
    ),
    max_size=6,
).map(b"".join)
commands = st.lists(st.tuples(outputs, st.integers(0, 255), st.binary(max_size=8)), min_size=1, max_size=4)


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[begin:end] for begin, end in zip([0, *at], [*at, len(data)], strict=True) if end > begin]


@given(commands=commands, cuts=st.lists(st.integers(0, 10_000), max_size=30), ended=st.booleans())
@example(commands=[(b"\x1e" + PREFIX[:5], 3, b"")], cuts=list(range(200)), ended=True)
@settings(max_examples=400)
def test_frames_are_found_in_any_pieces(commands: list[tuple[bytes, int, bytes]], cuts: list[int], ended: bool) -> None:
    """Each command's output is what stood before its frame, whatever it holds and however it arrives."""
    stream = b""
    for number, (output, code, name) in enumerate(commands):
        state = b"/" + name.replace(b"\0", b"").replace(b"\x1e", b"") + b"\0export A='x'\n"
        stream += output + b"\x1e%s n%d %d\x1e%s\x1e%s n%d\x1e" % (PREFIX, number, code, state, PREFIX, number)
    stream += b"last\x1e%s exited 9\x1e" % PREFIX if ended else b""
    frames, pieces = Frames(PREFIX), in_pieces(stream, cuts)
    for number, (output, code, _) in enumerate(commands):
        end, got = read(frames, pieces, b"n%d" % number)
        assert end == CommandEnd(code)
        # Who says that the shell is about to end must go on, or its own output is lost.
        assert got == output or b" exit " in output
    if ended:
        assert read(frames, pieces, b"m") == (ShellEnd(9), b"last")
    frames.feed(b"".join(pieces), b"m", Tail(0))
    assert frames.state is not None
    assert frames.state.declarations == {b"A": b"export A='x'\n"}


def read(frames: Frames, pieces: list[bytes], nonce: bytes) -> tuple[CommandEnd | ShellEnd, bytes]:
    tail = Tail(1 << 20)
    end = frames.feed(b"", nonce, tail)
    while end is None:
        end = frames.feed(pieces.pop(0), nonce, tail)
    return end, tail.bytes()


@given(pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=30), max_bytes=st.integers(1, 100))
def test_a_tail_is_the_end_of_all(pieces: list[bytes], max_bytes: int) -> None:
    tail = Tail(max_bytes)
    for piece in pieces:
        tail.add(piece)
        assert tail._held < max_bytes + 2 * 40
    whole = b"".join(pieces)
    assert tail.bytes() == whole[-max_bytes:]
    assert tail.truncated == (len(whole) > max_bytes)


NAMES = st.from_regex(r"R_[A-Za-z0-9_]{0,8}", fullmatch=True)
VALUES = st.binary(max_size=20).map(lambda value: value.replace(b"\0", b""))


@pytest.mark.parametrize("shell", SHELLS)
@given(env=st.dictionaries(NAMES, VALUES, max_size=6))
@example(
    env={"R_": b"'", "R_a": b'$x `id` $(id) \\ "', "R_b": b"a\nexport R_c='x'\n", "R_d": b"\x81\x88\xff", "R_e": b""}
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_shell_exports_it_can_be_given_again(
    tmp_path_factory: pytest.TempPathFactory, shell: str, env: dict[str, bytes]
) -> None:
    argv = [*([shell, "sh"] if shell == "busybox" else [shell])]
    own = {"PATH": os.environ["PATH"].encode(), "LANG": b"C.UTF-8", "R_gone": b"1"}
    told = run(argv, b"unset R_gone; export R_bare; pwd; export -p", own | env)
    directory, _, declarations = told.partition(b"\n")
    state, noise = ShellState.read(directory + b"\0" + declarations)
    assert noise == b""
    assert state is not None
    first = ShellState(declarations={b"R_gone": b""})
    again = run(argv, restoring_text(first, state) + b"env -0" + b"\n", own)
    found = dict(entry.partition(b"=")[::2] for entry in again.split(b"\0") if entry.startswith(b"R_"))
    assert found == {name.encode(): value for name, value in env.items()}


def run(argv: list[str], script: bytes, env: dict[str, bytes]) -> bytes:
    return subprocess.run(argv, input=script, env=env, stdout=subprocess.PIPE, check=True).stdout


@given(noise=st.binary(min_size=1, max_size=20), at=st.integers(0, 60))
@example(noise=b"rm -rf /\n", at=0)
@example(noise=b"declare -x A=$(rm -rf /)\n", at=0)
@example(noise=b'declare -x A="$(rm -rf /)"\n', at=0)
def test_what_is_no_declaration_is_never_kept(noise: bytes, at: int) -> None:
    """Whatever a background job writes between the lines: only literal values are read back."""
    block = b"/\0" + b"".join((b'declare -x A="1"\n', noise, b"export B='2'\n"))
    state, _ = ShellState.read(block[:at] + noise + block[at:])
    if state is not None:
        text = b"".join(state.declarations.values())
        probe = subprocess.run(["bash", "--norc"], input=b"PATH=/nowhere\n" + text, capture_output=True, check=False)
        assert b"not found" not in probe.stderr
