"""Everybody who builds sequences from calls, each a process that does it when told to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from peers.installed import PACKAGES, Package

HERE: Final = Path(__file__).parent
PEERS: Final = {
    "verifiers": Package("verifiers", "verifiers==0.4.0", ("python3.12", "python3.13", "python3.11")),
    # Its builder needs none of the 1.4 GB that the package asks for, and no newer patch release of Python.
    "nemo-gym": Package(
        "nemo-gym",
        "nemo-gym==0.7.0",
        ("python3.13", "python3.12"),
        options=("--no-deps", "--ignore-requires-python"),
        further=("pydantic==2.14.4", "orjson"),
    ),
    "agentlightning": PACKAGES["agentlightning"],
}


@dataclass(frozen=True)
class Builder:
    """Who it is, and how its process is started: program and arguments after the file of sessions."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: str = ""
    exact: bool = True
    """Whether it builds sequences at all: reading alone does not."""

    def is_installed(self) -> bool:
        """Whether it can run."""
        return not self.peer or PEERS[self.peer].is_installed()


def builders(blobs: Path) -> list[Builder]:
    """All of them, ours and the floor first. Those that begin with objects instead of bytes say so."""
    ours = "stitch_rollyard.py"
    return [
        Builder("floor", "stitch_floor.py", ("deltas",)),
        Builder("floor, whole prompts", "stitch_floor.py", ("whole",)),
        Builder("Rollyard, reading only", ours, (str(blobs), "read"), exact=False),
        Builder("Rollyard", ours, (str(blobs), "stitch")),
        Builder("Rollyard, with digests", ours, (str(blobs), "digest")),
        Builder("Rollyard, from objects", ours, (str(blobs), "objects")),
        Builder("NeMo Gym, from objects", "stitch_nemo.py", ("whole",), "nemo-gym"),
        Builder("NeMo Gym, from objects, deltas", "stitch_nemo.py", ("deltas",), "nemo-gym"),
        Builder("NeMo Gym", "stitch_nemo.py", ("records",), "nemo-gym"),
        Builder("agentlightning, from objects", "stitch_agentlightning.py", (), "agentlightning"),
        Builder("verifiers, from objects", "stitch_verifiers.py", (), "verifiers"),
    ]


class Running:
    """The process of a builder."""

    def __init__(self, builder: Builder, process: subprocess.Popen[str], log: Path) -> None:
        self.builder = builder
        self.repeat: dict[int, int] = {}
        self._process = process
        self._log = log

    def order(self, **order: Any) -> dict[str, Any]:
        """The answer to an order. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say more
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"{self.builder.name} ended: {' | '.join(tail)}; its log is {self._log}")
        found: dict[str, Any] = json.loads(line)
        return found

    def cpu_s(self, turns: int, *, least_s: float) -> float:
        """Processor seconds of one session, over at least `least_s` in all."""
        if turns not in self.repeat:
            # The first time also loads what is loaded late.
            once_s = self.order(turns=turns, repeat=1)["cpu_s"]
            self.repeat[turns] = max(1, min(50, int(least_s / max(once_s, 1e-5))))
        seconds: float = self.order(turns=turns, repeat=self.repeat[turns])["cpu_s"]
        return seconds


@contextmanager
def running(builder: Builder, sessions: Path, folder: Path) -> Iterator[Running]:
    """The process of a builder, ready, until the block ends. Raises RuntimeError when it does not start."""
    python = str(PEERS[builder.peer].bin / "python") if builder.peer else sys.executable
    log = folder / f"{builder.name.replace(' ', '_').replace(',', '')}.log"
    command = [python, str(HERE / builder.script), str(sessions), *builder.arguments]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True)
    try:
        started = Running(builder, process, log)
        started.answer()
        yield started
    finally:
        process.terminate()
        process.communicate()


def installed(chosen: Sequence[Builder]) -> list[Builder]:
    """Those that can run; says of the others what is missing."""
    for name in dict.fromkeys(each.peer for each in chosen if not each.is_installed()):
        print(f"{PEERS[name].requirement} is not installed and left out; --install installs it")
    return [each for each in chosen if each.is_installed()]
