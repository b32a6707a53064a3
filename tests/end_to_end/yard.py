"""A whole Rollyard of real processes that a test may kill: nats-server, a scripted model server, one of each role."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import world
from msgspec import structs

from rollyard.gateway.scripted.journal import Entry, read_journal
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.client import Client
from rollyard.pipeline.config import Config, GatewayConfig, NatsConfig, SinkConfig, StoreConfig, WorkerConfig, to_toml
from rollyard.pipeline.crash import VARIABLE
from rollyard.pipeline.dead import letters
from rollyard.pipeline.embedded import find_binary, free_port, server_config
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.task import Task

STAGES = ("admit", "init", "run", "eval", "aggregate")
ROLES = ("gateway", "controller", "sink", *STAGES)
ROLLOUTS = int(os.environ.get("ROLLYARD_E2E_ROLLOUTS", "0"))
"""Rollouts of the large runs; 0: each test's own number."""
PATIENCE_S = 150.0


class Yard:
    """What runs, by name. Processes write to `<folder>/<name>.log`."""

    def __init__(self, folder: Path, config: Config, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.config = config
        self._env = os.environ | env
        self.config_file = folder / "config.toml"
        self.config_file.write_text(to_toml(config))
        self.ledger = folder / "ledger"
        self.tokenizer = world.make_tokenizer(folder / "tokenizer")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.bus: Bus
        self._arguments: dict[str, Sequence[str]] = {}
        self._marks = 0

    # --- processes ---

    def start(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Start a process of Rollyard: a role by its name, or `arguments` under a name."""
        command = arguments or (("worker", "--stages", name) if name in STAGES else (name,))
        self._spawn(name, [sys.executable, "-m", "rollyard", *command, "--config", str(self.config_file)], env)

    def _spawn(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        assert name not in self.processes or self.processes[name].poll() is not None, f"{name} still runs"
        self._arguments[name] = command
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=self._env | (env or {}), cwd="/"
            )

    def again(self, name: str, env: Mapping[str, str] | None = None) -> None:
        """Start a process that has ended with the same command."""
        self._spawn(name, self._arguments[name], env)

    def again_until(self, name: str, step: str) -> None:
        """Start it again so that it kills itself when it comes to `step`."""
        self._marks += 1
        self.again(name, {VARIABLE: f"{step}@{self.folder / f'mark-{self._marks}'}"})

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process."""
        self.processes[name].send_signal(number)

    async def ended(self, name: str) -> int:
        """Wait for its end; returns its exit status, negative: the signal."""
        process = self.processes[name]

        async def over() -> bool:
            return process.poll() is not None

        await self.until(over, f"the end of {name}")
        return process.returncode

    async def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        assert self.processes[name].poll() is None, f"{name} has ended by itself: {self.tail(name)}"
        self.signal(name, signal.SIGKILL)
        assert await self.ended(name) == -signal.SIGKILL

    async def stop(self, name: str) -> int:
        """SIGTERM, and wait for the end; returns its exit status."""
        self.signal(name, signal.SIGTERM)
        return await self.ended(name)

    def start_nats(self) -> None:
        """Start nats-server, on its old port and store."""
        port = int(self.config.nats.url.rpartition(":")[2])
        store = self.folder / "nats"
        store.mkdir(exist_ok=True)
        conf = store / "nats.conf"
        conf.write_text(server_config(store, port, 1 << 40))
        self._spawn("nats", [str(find_binary()), "-c", str(conf)])

    async def start_model(self) -> None:
        """Start the scripted model server, and enter it into the pool."""
        (self.folder / "script.json").write_text(json.dumps(world.script()))
        port = free_port()
        self._spawn(
            "model",
            [
                *(sys.executable, "-m", "rollyard", "scripted-llm", str(self.folder / "script.json")),
                *("--port", str(port), "--journal", str(self.folder / "journal.jsonl")),
                *("--tokenizer", str(self.tokenizer)),
            ],
        )
        server = LlmServer(
            server_id="scripted",
            url=f"http://127.0.0.1:{port}",
            engine="vllm",
            upstream_model="scripted",
            mode="tokens",
            tokenizer=str(self.tokenizer),
            policy_version=world.POLICY_VERSION,
            logprob_kind="raw",
        )
        await Bucket(self.bus, subjects.LLM_SERVERS, LlmServer).put(server.server_id, server)
        await self.answers(f"{server.url}/health")

    async def answers(self, url: str) -> None:
        """Wait until a GET of `url` gives 200."""
        async with aiohttp.ClientSession() as client:

            async def asked() -> bool:
                try:
                    async with client.get(url) as response:
                        return response.status == 200
                except aiohttp.ClientError:
                    return False

            await self.until(asked, url)

    async def ready(self) -> None:
        """Wait until the gateway listens and every stage has its consumer."""
        await self.answers(f"{self.config.gateway.address()}/healthz")
        wanted = set(self.processes) & (set(STAGES) - {"admit"})

        async def consumers() -> bool:
            names = (await self.bus.api(f"CONSUMER.NAMES.{subjects.STAGES}", {})).get("consumers") or []
            return wanted <= {name.partition("-")[0] for name in names}

        await self.until(consumers, "the consumers of the stages")

    # --- waiting and looking ---

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until `condition` is true; a bus that is away makes it false. Fails with a report after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while True:
            with suppress(BusError):
                if await condition():
                    return
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{await self.report()}"
            await asyncio.sleep(0.05)

    async def report(self) -> str:
        """Where everything stands, for a test that fails."""
        lines = [f"{name}: exit status {process.poll()}" for name, process in self.processes.items()]
        with suppress(BusError):
            stuck = [state for state in await self.states("*") if state.position != "ended"]
            lines += [f"{len(stuck)} rollouts are not at their end, for instance", *map(str, stuck[:4])]
        lines += [f"--- {name}\n{self.tail(name)}" for name in self.processes]
        return "\n".join(lines)

    async def states(self, run: str) -> list[RolloutState]:
        """Where the rollouts of a run stand; `*`: of all runs."""
        bucket: Bucket[RolloutState] = Bucket(self.bus, subjects.ROLLOUTS, RolloutState)
        return [state async for _, state, _ in bucket.items(f"{run}.*")]

    async def wait_positions(self, run: str, position: str, count: int) -> None:
        """Wait until at least so many rollouts of a run stand at a position."""

        async def there() -> bool:
            return sum(state.position == position for state in await self.states(run)) >= count

        await self.until(there, f"{count} rollouts at {position}")

    async def wait_commands(self, count: int) -> None:
        """Wait until agents have begun at least so many commands."""

        async def begun() -> bool:
            return self.commands_begun() >= count

        await self.until(begun, f"{count} commands of agents")

    def commands_begun(self) -> int:
        """How many commands agents have begun so far."""
        return self.ledger.read_bytes().count(b"\n") if self.ledger.exists() else 0

    def tail(self, name: str, lines: int = 12) -> str:
        """The end of what a process wrote."""
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    async def submit(self, run: str, tasks: Iterable[Task]) -> None:
        """Publish tasks as a trainer does."""
        await Client(self.bus, run).submit(list(tasks))

    async def delivered(self, run: str) -> int:
        """How many deliveries of a run stand in the sample stream."""
        return sum((await self.bus.subjects(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*")).values())

    async def wait_delivered(self, run: str, count: int, patience_s: float = PATIENCE_S) -> None:
        """Wait until a run has so many deliveries. Fails at once when there is a dead letter."""

        async def enough() -> bool:
            dead = [letter.reason async for _, letter in letters(self.bus, run)]
            assert dead == []
            return await self.delivered(run) >= count

        await self.until(enough, f"{count} deliveries of {run}", patience_s)

    def journal(self) -> dict[str, Entry]:
        """What the model server was asked and gave, by call id."""
        return {entry.request_id: entry for entry in read_journal(self.folder / "journal.jsonl")}

    def agents(self) -> list[str]:
        """Command lines of the processes of sandboxes that live: shims, agents and what they started."""
        root = os.fsencode(self.config.sandboxes_dir())
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if root in (path / "environ").read_bytes() or root in (path / "cmdline").read_bytes():
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        return found

    def rollyard(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Rollyard to its end."""
        command = [sys.executable, "-m", "rollyard", *arguments, "--config", str(self.config_file)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def config_for(folder: Path, **worker: object) -> Config:
    """Short waits, so that what died is noticed soon; free ports."""
    (folder / "secret").write_text("a secret of the tests, 32 bytes.")
    return Config(
        nats=NatsConfig(url=f"nats://127.0.0.1:{free_port()}"),
        gateway=GatewayConfig(port=free_port()),
        worker=structs.replace(
            WorkerConfig(ack_wait_s=3.0, heartbeat_s=0.8, lease_s=6.0, backends=("local",)), **worker
        ),
        store=StoreConfig(data=str(folder)),
        sink=SinkConfig(max_wait_s=1.0),
    )


@asynccontextmanager
async def yard(
    folder: Path,
    roles: Sequence[str] = ROLES,
    *,
    config: Config | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Yard]:
    """Everything started and ready, with `env` in every environment; at the end everything is killed."""
    running = Yard(folder, config or config_for(folder), env or {})
    async with AsyncExitStack() as stack:
        stack.callback(_end, running)
        running.start_nats()
        running.bus = await stack.enter_async_context(
            Bus.connect(running.config.nats.url, name="test", blobs=BlobStore(running.config.blobs_dir()), wait_s=30)
        )
        await running.until(lambda: _jetstream(running.bus), "JetStream")
        await ensure(running.bus)
        await running.start_model()
        for role in roles:
            running.start(role)
        await running.ready()
        yield running


async def _jetstream(bus: Bus) -> bool:
    return "memory" in await bus.api("INFO")


def _end(running: Yard) -> None:
    """Kill what runs, nats-server last, and what lives in sandboxes."""
    for process in reversed(running.processes.values()):
        process.kill()
        process.wait()
