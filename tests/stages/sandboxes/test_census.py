"""Processes of this machine, told apart and remembered: against real ones."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollyard.stages.sandboxes import census
from rollyard.stages.sandboxes.census import VARIABLE, Census, Key, at_work
from rollyard.stages.sandboxes.families import Families
from rollyard.stages.sandboxes.marked import kill_once, marked_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SLEEPER = ("sleep", "60")
FORKED = """
import os, sys, time
child = os.fork()
if child == 0:
    os.read(0, 1)
    os.execvpe("sleep", ["sleep", "60"], {sys.argv[1]: sys.argv[2]})
print(child, flush=True)
os.waitpid(child, 0)
"""
WITHOUT_FIRST_THREAD = """
import ctypes, threading, time
libc = ctypes.CDLL(None)
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
libc.pthread_exit(None)
"""


class Started:
    """Processes that a test started; they are killed and reaped at its end."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, *argv: str, mark: str = "") -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], **({VARIABLE: mark} if mark else {})}
        child = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        return child


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for child in started.children:
        child.kill()
        child.communicate()


@pytest.fixture
def mark() -> str:
    return f"{secrets.token_hex(8)}.agent."


def key_of(pid: int) -> Key:
    return next(process for process in Census().processes() if process[0] == str(pid))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def line_of(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout
    return child.stdout.readline().decode().strip()


def forbidden(*_: object) -> None:
    raise AssertionError("it was looked up again")


def test_a_process_is_looked_up_once(start: Started, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Census()
    marked, plain = key_of(start(*SLEEPER, mark=mark).pid), key_of(start(*SLEEPER).pid)
    until(lambda: known.mark(marked))
    assert known.mark(marked) == mark.encode()
    assert known.mark(plain) == b""
    assert known.family(plain, Families()) is None
    monkeypatch.setattr(census, "_stat", forbidden)
    monkeypatch.setattr(census, "_environment", forbidden)
    assert known.mark(marked) == mark.encode()
    assert known.mark(plain) == b""
    assert known.family(plain, Families()) is None
    with pytest.raises(AssertionError):
        known.mark((plain[0], plain[1] + 1))


def test_a_later_process_of_the_same_number_is_another(start: Started) -> None:
    child = start(*SLEEPER)
    assert key_of(child.pid) == (str(child.pid), os.stat(f"/proc/{child.pid}").st_ino)  # noqa: PTH116
    other = key_of(start(*SLEEPER).pid)
    assert key_of(child.pid)[1] != other[1]


def test_who_was_forked_only_may_become_marked(start: Started, mark: str) -> None:
    known = Census()
    parent = start(sys.executable, "-c", FORKED, VARIABLE, mark)
    child = key_of(int(line_of(parent)))
    assert known.mark(child) == known.mark(child) == b""
    assert known.family(child, Families()) is None
    assert parent.stdin
    parent.stdin.write(b"x")
    parent.stdin.flush()
    until(lambda: known.mark(child) == mark.encode())
    assert kill_once({(mark, None)}) == {(mark, None): 1}


def test_a_process_outlives_its_first_thread(start: Started, mark: str) -> None:
    child = start(sys.executable, "-c", WITHOUT_FIRST_THREAD, mark=mark)
    assert line_of(child) == "ready"
    until(lambda: ") Z " in Path(f"/proc/{child.pid}/stat").read_text())
    assert at_work(child.pid)
    assert Census().mark(key_of(child.pid)) == mark.encode()
    assert kill_once({(mark, None)}) == {(mark, None): 1}
    assert child.wait(30) == -9


def test_the_dead_are_not_killed_again(start: Started, mark: str) -> None:
    child = start(*SLEEPER, mark=mark)
    until(lambda: marked_processes(mark) == [str(child.pid)])
    assert kill_once({(mark, None)}) == {(mark, None): 1}
    until(lambda: not at_work(child.pid))
    assert kill_once({(mark, None)}) == {(mark, None): 0}
    assert marked_processes(mark) == []
    assert key_of(child.pid), "it was reaped too early for this test"


def test_the_ended_are_forgotten(start: Started, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Census()
    child = start(*SLEEPER, mark=mark)
    process = key_of(child.pid)
    until(lambda: known.mark(process))
    child.kill()
    child.wait()
    listed = known.processes()
    assert process not in listed
    for number in range(20 * len(listed)):
        known._marks[("0", number)] = b"x."
    known.processes()
    assert not known._marks
