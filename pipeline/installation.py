"""A whole Rollyard on one machine: nats-server, a model server, the gateway, and one process for each role.

`rollyard up` and `rollyard demo` are this. Everything it keeps is in its data folder; nothing but the number of
processes differs from a cluster.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from msgspec import structs

from rollyard.pipeline import embedded, streams
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import ENV_PREFIX, Config, to_toml
from rollyard.pipeline.datafolder import DataFolder
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.relay import answers_relay, needs_relay
from rollyard.pipeline.supervisor import (
    ChildSpec,
    Probe,
    Supervisor,
    answers_http,
    answers_tcp,
    claim_port,
)
from rollyard.schemas import subjects
from rollyard.schemas.errors import SetupError
from rollyard.schemas.fleet import LlmServer

log = structlog.get_logger(__name__)

HOST: Final = "127.0.0.1"
SERVER_ID: Final = "up"
WORKERS: Final = ("admit", "init", "run", "eval", "aggregate")
MODEL_READY_S: Final = 120.0
NATS_RANK: Final = 5
DRAIN_S: Final = 40.0
"""More than a worker takes to drain."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The model server: `entry` is what the pool is told about it.

    `command` are the arguments of `rollyard` that start it, to which `--port N` is added. Without a command it runs
    elsewhere, at the URL of the entry.
    """

    entry: LlmServer
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run, and on which ports (0: any free one)."""

    data: Path
    base: Config
    model: ModelPlan
    nats_port: int = 0
    gateway_port: int = 0
    model_port: int = 0


class Installation:
    """A running installation. Make one with `async with Installation.running(plan) as installation`."""

    def __init__(self, folder: DataFolder, config: Config, bus: Bus, supervisor: Supervisor, llm: LlmServer) -> None:
        self.folder = folder
        self.config = config
        self.bus = bus
        self.supervisor = supervisor
        self.llm = llm

    @classmethod
    @asynccontextmanager
    async def running(cls, plan: Plan) -> AsyncIterator[Installation]:
        """Start everything, and stop it in the order that loses nothing.

        Raises ConfigError for a data folder of a newer version, SetupError for a folder in use, a busy port, or a
        program that does not start.
        """
        folder = DataFolder(plan.data)
        folder.open()
        with folder.locked():
            config, ports = _resolve(plan, folder)
            folder.config.write_text(to_toml(config))
            async with Supervisor.running(
                folder.logs, lambda: _write_state(plan, folder, config, children, ports)
            ) as children:
                await children.start(_nats(folder, ports["nats"]))
                async with _connected(config) as bus:
                    llm = await _start_model(children, plan.model, ports["model"])
                    await Bucket[LlmServer](bus, subjects.LLM_SERVERS, LlmServer).put(SERVER_ID, llm)
                    for spec in _roles(folder, config, ports):
                        await children.start(spec)
                    try:
                        yield cls(folder, config, bus, children, llm)
                    finally:
                        # Before the connection to the bus ends, and nats-server with it.
                        await children.stop(NATS_RANK - 1)


def _resolve(plan: Plan, folder: DataFolder) -> tuple[Config, dict[str, int]]:
    """The configuration that the children get: the user's, with the addresses and folders of this installation."""
    base = plan.base
    ports = {
        "nats": claim_port(HOST, plan.nats_port, "--nats-port"),
        "gateway": claim_port(base.gateway.host, plan.gateway_port, "--gateway-port"),
        "model": claim_port(HOST, plan.model_port, "--model-port") if plan.model.command else 0,
    }
    config = structs.replace(
        base,
        nats=structs.replace(base.nats, url=f"nats://{HOST}:{ports['nats']}"),
        gateway=structs.replace(base.gateway, port=ports["gateway"]),
        store=structs.replace(base.store, data=str(folder.root)),
        # It is one of our children.
        relay=structs.replace(base.relay, start=False),
    )
    return config, ports


@asynccontextmanager
async def _connected(config: Config) -> AsyncIterator[Bus]:
    async with Bus.connect(config.nats.url, name="up", blobs=BlobStore(config.blobs_dir()), wait_s=30.0) as bus:
        for report in await streams.ensure(bus, config.limits):
            log.warning("stream_differs", report=report)
        yield bus


def _child_env() -> dict[str, str]:
    """The environment without our variables: the configuration that children are given holds them already."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return env | {"ROLLYARD_DEBUG": "1"}


def rollyard(folder: DataFolder, *arguments: str) -> list[str]:
    """The command line of one of our own processes, under the configuration of this installation."""
    return [sys.executable, "-m", "rollyard", *arguments, "--config", str(folder.config)]


def _nats(folder: DataFolder, port: int) -> ChildSpec:
    conf = folder.root / "nats.conf"
    conf.write_text(embedded.server_config(folder.nats, port, 1 << 40))
    return ChildSpec(
        name="nats",
        command=[str(embedded.find_binary()), "-c", str(conf)],
        stop_rank=NATS_RANK,
        ready=answers_tcp(HOST, port),
        orphan_signal=signal.SIGTERM,
    )


async def _start_model(children: Supervisor, model: ModelPlan, port: int) -> LlmServer:
    """Start the model server, or look for the one that runs elsewhere. Returns its entry in the pool."""
    if not model.command:
        await _check_model_server(model.entry)
        return model.entry
    url = f"http://{HOST}:{port}"
    await children.start(
        ChildSpec(
            name="model",
            command=[sys.executable, "-m", "rollyard", *model.command, "--port", str(port)],
            stop_rank=NATS_RANK - 1,
            env=_child_env(),
            ready=answers_http(f"{url}/health"),
            ready_s=MODEL_READY_S,
            stop_s=5.0,
        )
    )
    return structs.replace(model.entry, url=url)


async def _check_model_server(entry: LlmServer) -> None:
    key = os.environ.get(entry.api_key_env, "") if entry.api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not await answers_http(f"{entry.url}/v1/models", headers)():
        raise SetupError(
            f"no model server answers at {entry.url}: GET /v1/models gave no list",
            hint="start it first, or leave --llm out to use the small local model",
        )


def _roles(folder: DataFolder, config: Config, ports: dict[str, int]) -> list[ChildSpec]:
    def role(name: str, stop_rank: int, *arguments: str, ready: Probe | None = None) -> ChildSpec:
        command = rollyard(folder, *arguments)
        return ChildSpec(name=name, command=command, stop_rank=stop_rank, ready=ready, env=_child_env(), stop_s=DRAIN_S)

    listening = answers_tcp(config.gateway.host, ports["gateway"])
    relay = [role("relay", 1, "relay", ready=answers_relay(config.relay_dir()))] if needs_relay(config) else []
    return [
        role("gateway", 3, "gateway", ready=listening),
        role("controller", 2, "controller"),
        role("sink", 1, "sink"),
        *relay,
        *(role(stage, 0, "worker", "--stages", stage) for stage in WORKERS),
    ]


def _write_state(plan: Plan, folder: DataFolder, config: Config, children: Supervisor, ports: dict[str, int]) -> None:
    """For people and programs that want to know what runs here; see docs/cli.md."""
    folder.write_state(
        {
            "pid": os.getpid(),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "nats": config.nats.url,
            "gateway": config.gateway.address(),
            "model": plan.model.entry.url or f"http://{HOST}:{ports['model']}",
            "tokenizer": plan.model.entry.tokenizer,
            "children": {name: child.pid for name, child in children.children.items()},
            "restarts": {name: child.restarts for name, child in children.children.items() if child.restarts},
        }
    )
