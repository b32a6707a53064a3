"""Every agent in every sandbox: real workers, gateway and relay in this process, each agent with a model of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
from rig import SECRET, Rig, open_rig
from scenes import FIRST, SECOND, TASK, Scene, say, task, write_first

from rollyard.gateway.relay.service import serve_relay
from rollyard.pipeline.client import Client
from rollyard.pipeline.codec import decode
from rollyard.pipeline.config import Config, GatewayConfig, NatsConfig, StoreConfig, WorkerConfig
from rollyard.pipeline.log import read_rollout
from rollyard.schemas import subjects
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent
from rollyard.schemas.sample import Delivery
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task, Timeouts
from rollyard.stages.sandbox import open_backend
from rollyard.stages.worker import backend_settings, run_worker

BACKENDS = ("local", "bubblewrap", "docker")
IMAGE = "rollyard-tests-matrix"
JAIL_UID = 64_042
SLOTS = 2
"""Agents at a time in each kind of sandbox: they take long to start, and the cores are few."""
PATIENCE_S = 600.0
CHECK = f"printf %s '{FIRST}' | diff - first.txt && printf %s '{SECOND}' | diff - second.txt"
"""Both files are right, to the byte."""
AGENTS = {
    "claude_code": "claude",
    "codex": "codex",
    "hermes": "hermes",
    "mini_swe_agent": "mini-swe-agent",
    "openclaw": "openclaw",
    "opencode": "opencode",
}
"""Harnesses of third-party agents, with the names by which scenes know them."""
PLAIN = [
    say(f"```\n{write_first('mini-swe-agent')['arguments']['command']}\n```"),
    say("```\necho two > second.txt\n```"),
    say("done"),
]
"""The same work for agents that run the text of each reply."""
RUN_CURL = """
import json, os, subprocess, urllib.request
url, messages = os.environ["MY_URL"], [{"role": "user", "content": os.environ["MY_PROMPT"]}]
headers = {"Authorization": "Bearer " + os.environ["MY_KEY"], "Content-Type": "application/json"}
while True:
    body = json.dumps({"model": os.environ["MY_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    if said == "done":
        break
    output = subprocess.run(["sh", "-c", said.strip("`").strip()], capture_output=True, text=True).stdout
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": output or "(nothing)"}]
print("All done.")
"""
"""Somebody's own agent, for the harness `command`."""
COMMAND_ARGS = {
    "command": ["{python}", "{home}/agent.py"],
    "files": {"agent.py": RUN_CURL},
    "env": {"MY_URL": "{base_url}", "MY_KEY": "{api_key}", "MY_PROMPT": "{prompt}", "MY_MODEL": "{model}"},
}
BUILT_IN: dict[str, dict[str, Any]] = {"bash": {"examples": []}, "command": COMMAND_ARGS}
ARGS: dict[str, dict[str, Any]] = {"claude_code": {"max_retries": 1}} | BUILT_IN


def conversation(harness: str) -> list[dict[str, Any]]:
    """What the model says to the agent of a harness."""
    return task(AGENTS[harness]) if harness in AGENTS else [{"match": "", "turns": PLAIN}]


@dataclass(frozen=True)
class Cell:
    """What came of one agent in one kind of sandbox."""

    delivery: Delivery
    result: AgentResult
    events: tuple[RolloutEvent, ...]

    def told(self) -> str:
        """For the message of an assertion."""
        return f"{self.delivery.status} {self.delivery.failure} {self.result}"


class Matrix:
    """Plays tasks through the whole pipeline."""

    def __init__(self, rig: Rig, config: Config, backends: tuple[str, ...]) -> None:
        self.rig = rig
        self.config = config
        self.backends = backends

    async def model(self, name: str, turns: list[dict[str, Any]], **script: Any) -> None:
        """Serve a model of that name."""
        await self.rig.model(name, Scene(agent="", conversations=turns, script=script))

    def task(self, harness: str, backend: str, *, model: str = "", **fields: Any) -> Task:
        """The task for one cell. `fields` are those of AgentSpec, but for `run_s`."""
        run_s = fields.pop("run_s", PATIENCE_S)
        image = {"docker": IMAGE, "bubblewrap": str(images.root_tree(JAIL_UID if os.getuid() == 0 else None))}
        args = ARGS.get(harness, {}) | fields.pop("args", {})
        return Task(
            id=f"{model or harness}-{backend}",
            prompt=TASK,
            agent=AgentSpec(harness=harness, model=model or harness, args=args, **fields),
            sandbox=SandboxSpec(backend=backend, image=image.get(backend, "")),
            evaluation=EvaluationSpec(rule="command", args={"command": CHECK}),
            timeouts=Timeouts(init_s=120, run_s=run_s, eval_s=60),
            max_attempts=1,
        )

    async def play(self, run: str, tasks: Iterable[Task]) -> dict[str, Cell]:
        """Submit tasks, wait for their deliveries; what came of each, by its id."""
        wanted = list(tasks)
        await Client(self.rig.bus, run).submit(wanted)
        found: dict[str, Cell] = {}
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < len(wanted):
                async for stored in self.rig.bus.read(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*"):
                    delivery = decode(stored.data, Delivery)
                    if delivery.task_id not in found:
                        found[delivery.task_id] = await self._cell(run, delivery)
                await asyncio.sleep(0.2)
        return found

    async def _cell(self, run: str, delivery: Delivery) -> Cell:
        rollout = Rollout.of(run, delivery.task_id, 0, 1)
        logged = await read_rollout(self.rig.bus, run, rollout.rollout_id, kinds=("life",))
        events = tuple(event for _, event in logged if isinstance(event, RolloutEvent))
        results = [event.result for event in events if event.result is not None]
        return Cell(delivery, results[-1] if results else AgentResult(exit_code=None), events)


async def _usable(config: Config) -> tuple[str, ...]:
    """The backends that work on this machine; in CI all of them must."""
    found = []
    for name in BACKENDS:
        try:
            async with open_backend(name, backend_settings(config, name)) as backend:
                await backend.list_owned()
                found.append(name)
        except SandboxError:
            if os.environ.get("CI"):
                raise
    return tuple(found)


def _import_image() -> None:
    import docker  # noqa: PLC0415 - a laptop without an engine has no use for it

    client = docker.from_env(timeout=120)
    digest = images.root_tar().stem
    if not client.images.list(f"{IMAGE}:{digest}"):
        client.api.import_image(str(images.root_tar()), repository=IMAGE, tag=digest)
    client.api.tag(f"{IMAGE}:{digest}", IMAGE, "latest")
    client.close()


@asynccontextmanager
async def open_matrix(folder: Path) -> AsyncIterator[Matrix]:
    """Gateway, relay and a worker of every stage, for the time of the block."""
    async with open_rig(folder) as rig, AsyncExitStack() as stack:
        (folder / "secret").write_bytes(SECRET)
        config = Config(
            nats=NatsConfig(url=rig.nats),
            store=StoreConfig(data=str(folder), blobs=str(folder / "blobs")),
            gateway=GatewayConfig(url=rig.gateway.url),
        )
        backends = await _usable(config)
        if "docker" in backends:
            await asyncio.to_thread(_import_image)
        config = Config(
            nats=config.nats,
            store=config.store,
            gateway=config.gateway,
            worker=WorkerConfig(backends=backends, slots=SLOTS),
        )
        stop = asyncio.Event()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        group.create_task(serve_relay(config, stop))
        group.create_task(run_worker(config, ("admit", "init", "run", "eval", "aggregate"), SLOTS, stop))
        yield Matrix(rig, config, backends)
