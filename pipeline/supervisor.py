"""Child processes that are kept running: started when ready, restarted when they die, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from rollyard.pipeline import leash
from rollyard.schemas.errors import RollyardError, SetupError

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
STEADY_S: Final = 60.0
"""A child that ran for so long starts again without a wait."""
HOPELESS: Final = frozenset({2, 3})
"""Exit codes that say that another try would end the same: wrong configuration, or something is missing."""

Probe = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A program to keep running.

    `stop_rank` orders the stop: lower ranks end before higher ones are asked to. `orphan_signal` is what the program
    gets when the supervisor is killed.
    """

    name: str
    command: Sequence[str]
    stop_rank: int
    env: dict[str, str] | None = None
    ready: Probe | None = None
    ready_s: float = 60.0
    stop_s: float = 20.0
    orphan_signal: signal.Signals = signal.SIGKILL


class Child:
    """One program and its current process."""

    def __init__(self, spec: ChildSpec, log_file: Path) -> None:
        self.spec = spec
        self.log_file = log_file
        self.restarts = 0
        self.stopping = False
        self.process: asyncio.subprocess.Process | None = None
        self.keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the living process, else None."""
        return self.process.pid if self.process and self.process.returncode is None else None

    async def spawn(self) -> None:
        """Start the process, in a session of its own so that Ctrl-C reaches only the supervisor."""
        command = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), str(int(self.spec.orphan_signal))]
        with self.log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.spec.env,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def died(self, what: str) -> SetupError:
        """The error that tells how this child ended, with what it said last."""
        return SetupError(f"{self.spec.name} {what}; it said last: {self.last_words()}", hint=f"see {self.log_file}")

    def last_words(self) -> str:
        """The last line of its output, at most 500 characters."""
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - 10_000))
            lines = file.read().decode(errors="replace").splitlines()
        return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "nothing")


class Supervisor:
    """Keeps children running. Make one with `async with Supervisor.running(...) as supervisor`."""

    def __init__(self, logs: Path, tasks: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        self.children: dict[str, Child] = {}
        self._logs = logs
        self._tasks = tasks
        self._on_change = on_change

    @classmethod
    @asynccontextmanager
    async def running(cls, logs: Path, on_change: Callable[[], None] = lambda: None) -> AsyncIterator[Supervisor]:
        """Write the output of each child to `logs`/<name>.log; call `on_change` when a pid changes.

        At the end all children are stopped, lowest `stop_rank` first. The first SIGINT or SIGTERM cancels the body, the
        second kills the children. Raises SetupError when a child cannot run.
        """
        body = asyncio.current_task()
        assert body is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                supervisor = cls(logs, tasks, on_change)
                with stop_on_signals(body.cancel, supervisor.kill):
                    try:
                        yield supervisor
                    finally:
                        await supervisor.stop()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child and wait until it is ready. Raises SetupError when it ends, or is not ready in time."""
        child = self.children[spec.name] = Child(spec, self._logs / f"{spec.name}.log")
        await child.spawn()
        self._on_change()
        await self._until_ready(child)
        child.keeper = self._tasks.create_task(self._keep(child), name=f"keep {spec.name}")
        return child

    async def _until_ready(self, child: Child) -> None:
        spec = child.spec
        deadline = time.monotonic() + spec.ready_s
        while spec.ready and not await spec.ready():
            if child.pid is None:
                code = child.process.returncode if child.process else None
                raise child.died(f"ended with exit code {code} while it started")
            if time.monotonic() > deadline:
                raise child.died(f"was not ready after {spec.ready_s:g} s")
            await asyncio.sleep(0.05)

    async def _keep(self, child: Child) -> None:
        backoff_s = FIRST_BACKOFF_S
        while child.process:
            started = time.monotonic()
            code = await child.process.wait()
            if child.stopping:
                return
            if code in HOPELESS:
                raise child.died(f"ended with exit code {code}")
            if time.monotonic() - started > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            said = child.last_words()
            log.warning("child_died", child=child.spec.name, exit_code=code, said=said, restart_in_s=backoff_s)
            self._on_change()
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)
            await child.spawn()
            child.restarts += 1
            self._on_change()

    async def stop(self, up_to_rank: int = 99) -> None:
        """Stop children, lowest rank first: SIGTERM, and SIGKILL for one that does not end in its time."""
        living = [child for child in self.children.values() if child.spec.stop_rank <= up_to_rank]
        ranked = sorted(living, key=lambda child: child.spec.stop_rank)
        for child in ranked:
            child.stopping = True
        for _, same in groupby(ranked, key=lambda child: child.spec.stop_rank):
            async with asyncio.TaskGroup() as tasks:
                for child in same:
                    tasks.create_task(self._stop_child(child))
        self._on_change()

    async def _stop_child(self, child: Child) -> None:
        if child.keeper:
            child.keeper.cancel()
            await asyncio.wait([child.keeper])
        if child.process is None:
            return
        child.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(child.process.wait(), child.spec.stop_s)
        except TimeoutError:
            log.warning("child_killed", child=child.spec.name, after_s=child.spec.stop_s)
            child.signal(signal.SIGKILL)
            await child.process.wait()

    def kill(self) -> None:
        """End all children at once; nothing that is logged is lost by it."""
        for child in self.children.values():
            child.stopping = True
            child.signal(signal.SIGKILL)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to show of a group: the first of ours, else the first that is no mere cancellation."""
    leaves = list(_leaves(group))
    ours = [leaf for leaf in leaves if isinstance(leaf, RollyardError)]
    others = [leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)]
    return (ours or others or leaves)[0]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


@contextmanager
def stop_on_signals(on_first: Callable[[], object], on_second: Callable[[], object]) -> Iterator[None]:
    """Within, the first SIGINT or SIGTERM calls `on_first`, every further one `on_second`."""
    loop = asyncio.get_running_loop()
    calls = [on_first]

    def handle() -> None:
        (calls.pop() if calls else on_second)()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def claim_port(host: str, port: int, option: str) -> int:
    """`port` if it is free on `host`, or a free one for 0. Raises SetupError for a busy one, naming `option`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(
                f"port {port} of {host} cannot be used: {error.strerror}",
                hint=f"stop the program that uses it, or choose another with {option} (0: any free one)",
            ) from error
        chosen: int = probe.getsockname()[1]
        return chosen


def answers_tcp(host: str, port: int) -> Probe:
    """A probe: something listens there."""

    async def probe() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    return probe


def answers_http(url: str, headers: Mapping[str, str] | None = None) -> Probe:
    """A probe: GET `url` is answered with status 200."""

    async def probe() -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=2)
            async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, session.get(url) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    return probe
