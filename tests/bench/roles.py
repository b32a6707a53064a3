"""A nats-server and one process a role, for the benchmarks."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import Config, NatsConfig, StoreConfig, to_toml
from rollyard.pipeline.embedded import EmbeddedNats, free_port, nats_server, stop
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects

ROLES = ("admit", "init", "run", "eval", "aggregate")


@dataclass
class Yard:
    """What runs."""

    folder: Path
    config: Config
    nats: EmbeddedNats
    monitor_port: int
    bus: Bus
    children: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, name: str, *arguments: str) -> None:
        """Start one process of Rollyard."""
        path = self.folder / "config.toml"
        path.write_text(to_toml(self.config))
        with (self.folder / f"{name}.log").open("wb") as log:
            self.children[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollyard", *arguments, "--config", str(path), stdout=log, stderr=log
            )

    async def start_workers(self, roles: Sequence[str] = ROLES, slots: int = 64) -> None:
        """Start one worker process a role and wait until their consumers exist."""
        for role in roles:
            await self.start(role, "worker", "--stages", role, "--slots", str(slots))
        wanted = set(roles) - {"admit"}
        while wanted:
            await asyncio.sleep(0.2)
            names = (await self.bus.api(f"CONSUMER.NAMES.{subjects.STAGES}", {})).get("consumers") or []
            wanted -= {name.partition("-")[0] for name in names}

    def pids(self) -> list[int]:
        """The processes of Rollyard, without nats-server."""
        return [child.pid for child in self.children.values()]

    def operations(self) -> int:
        """Messages that nats-server has received from clients so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor_port}/varz") as reply:
            return int(json.load(reply)["in_msgs"])

    async def delivered(self) -> int:
        """Messages in the sample stream: one for each rollout and one for each group."""
        info = await self.bus.stream_info(subjects.SAMPLES)
        return int(info["state"]["messages"])


@asynccontextmanager
async def yard(folder: Path, **settings: object) -> AsyncIterator[Yard]:
    """A nats-server with streams, and room for workers. `settings` replaces sections of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret").write_text("benchmark secret, 32 bytes long!")
    monitor_port = free_port()
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server(folder / "nats", monitor_port=monitor_port))
        bus = await stack.enter_async_context(Bus.connect(nats.url, name="bench"))
        await ensure(bus)
        config = Config(nats=NatsConfig(url=nats.url), store=StoreConfig(data=str(folder)))
        running = Yard(folder, structs.replace(config, **settings), nats, monitor_port, bus)
        try:
            yield running
        finally:
            async with asyncio.TaskGroup() as group:
                for child in running.children.values():
                    group.create_task(stop(child))


async def delivered_at_least(running: Yard, wanted: int) -> None:
    """Return when the sample stream holds `wanted` messages, groups included."""
    done = False
    while not done:
        await asyncio.sleep(0.1)
        done = await running.delivered() >= wanted
