"""Processes that compare mathematical expressions: a few that stay, since the library takes a second to load.

One that takes too long is killed, and so is one that uses too much memory. They end with the worker, whatever its end.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any, Final

import msgspec

MAX_PROCESSES: Final = 2
MAX_MEMORY_BYTES: Final = 3 << 30
STARTED_S: Final = 60.0
MAX_QUESTIONS: Final = 2_000
"""After so many a process is replaced: the library keeps what it has computed."""


class MathTrouble(Exception):
    """There is no result: it took too long, or an accepted answer is no expression."""


class MathProcesses:
    """Up to MAX_PROCESSES of them, started when they are needed. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._room = threading.BoundedSemaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_MathProcess] = []
        self._registered = False

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The result of one comparison. Raises MathTrouble."""
        with self._room:
            process = self._take()
            try:
                answer = process.ask(question, timeout_s)
            except BaseException:
                process.kill()
                raise
            with self._lock:
                self._idle.append(process)
        if "trouble" in answer:
            raise MathTrouble(answer["trouble"])
        return answer

    def close(self) -> None:
        """End the idle ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _take(self) -> _MathProcess:
        with self._lock:
            if not self._registered:
                atexit.register(self.close)
                self._registered = True
            while self._idle:
                process = self._idle.pop()
                if process.fit():
                    return process
                process.kill()
        return _MathProcess()


class _MathProcess:
    """One process: a line of JSON in, a line out."""

    def __init__(self) -> None:
        self._asked = 0
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", "rollyard.stages.evaluators.math_program", str(MAX_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def fit(self) -> bool:
        return self._asked < MAX_QUESTIONS and self._process.poll() is None

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self._ready:
            # Loading counts for no question.
            self._line(STARTED_S, "the process that compares expressions did not start")
            self._ready = True
        self._asked += 1
        assert self._process.stdin is not None
        late = f"the comparison takes longer than {timeout_s:g} s, or more memory than there is"
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise MathTrouble(late) from None
        found: dict[str, Any] = msgspec.json.decode(self._line(timeout_s, late))
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # what was not written is of no use to a dead process
                    continue

    def _line(self, timeout_s: float, late: str) -> bytes:
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            more = os.read(self._process.stdout.fileno(), 65_536) if ready else b""
            if not more:
                raise MathTrouble(late)
            line += more
        return line
