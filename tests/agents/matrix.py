"""Every agent in every sandbox: real workers, gateway and relay in this process, each agent with a model of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import images
from msgspec import structs
from rig import SECRET, Rig, open_rig, patiently
from scenes import FIRST, SECOND, TASK, Scene, say, task, write_first

from rollyard.gateway.relay.service import relay_service
from rollyard.pipeline.client import Client
from rollyard.pipeline.codec import decode
from rollyard.pipeline.config import Config, GatewayConfig, NatsConfig, RelayConfig, StoreConfig, WorkerConfig
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
JAIL_UID = 64_042
SLOTS = 2
"""Agents at a time in each kind of sandbox: they take long to start, and the cores are few."""
PATIENCE_S = 1500.0
"""For all cells together, on a machine that has much else to do; what is not done then is told as it stands."""
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
    """Plays tasks through the whole pipeline. `unusable` says why backends do not work on this machine."""

    def __init__(self, rig: Rig, images: dict[str, str], unusable: dict[str, str], worker: asyncio.Task[None]) -> None:
        self.rig = rig
        self.unusable = unusable
        self._images = images
        self._worker = worker

    async def model(self, name: str, turns: list[dict[str, Any]], **script: Any) -> None:
        """Serve a model of that name."""
        await self.rig.model(name, Scene(agent="", conversations=turns, script=script))

    def task(self, harness: str, backend: str, *, model: str = "", **fields: Any) -> Task:
        """The task for one cell. `fields` are those of AgentSpec, but for `run_s`."""
        run_s = fields.pop("run_s", PATIENCE_S)
        args = ARGS.get(harness, {}) | fields.pop("args", {})
        return Task(
            id=f"{model or harness}-{backend}",
            prompt=TASK,
            agent=AgentSpec(harness=harness, model=model or harness, args=args, **fields),
            sandbox=SandboxSpec(backend=backend, image=self._images.get(backend, "")),
            evaluation=EvaluationSpec(rule="command", args={"command": CHECK}),
            timeouts=Timeouts(init_s=PATIENCE_S, run_s=run_s, eval_s=PATIENCE_S),
            max_attempts=1,
        )

    async def play(self, run: str, tasks: Iterable[Task]) -> dict[str, Cell | str]:
        """Submit tasks, wait for their deliveries; what came of each, by its id: how far it came if it is not done.

        Raises what the worker died of.
        """
        given = list(tasks)
        await patiently(lambda: Client(self.rig.bus, run).submit(given))
        found: dict[str, Cell | str] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while len(found) < len(given):
                    self._check_worker()
                    for delivery in await patiently(lambda: self._deliveries(run)):
                        if delivery.task_id not in found:
                            found[delivery.task_id] = await self._cell(run, delivery)
                    await asyncio.sleep(1.0)
        for task_id in {each.id for each in given} - found.keys():
            events = await self._life(run, task_id)
            found[task_id] = f"not delivered within {PATIENCE_S:g} s: {events}"
        return found

    def _check_worker(self) -> None:
        if self._worker.done():
            self._worker.result()
            raise AssertionError("the worker ended by itself")

    async def _deliveries(self, run: str) -> list[Delivery]:
        read = self.rig.bus.read(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*")
        return [decode(stored.data, Delivery) async for stored in read]

    async def _cell(self, run: str, delivery: Delivery) -> Cell:
        events = await self._life(run, delivery.task_id)
        results = [event.result for event in events if event.result is not None]
        return Cell(delivery, results[-1] if results else AgentResult(exit_code=None), events)

    async def _life(self, run: str, task_id: str) -> tuple[RolloutEvent, ...]:
        rollout = Rollout.of(run, task_id, 0, 1)
        logged = await patiently(lambda: read_rollout(self.rig.bus, run, rollout.rollout_id, kinds=("life",)))
        return tuple(event for _, event in logged if isinstance(event, RolloutEvent))


async def _unusable(config: Config) -> dict[str, str]:
    """Why backends do not work on this machine; in CI all of them must."""
    found = {}
    for name in BACKENDS:
        try:
            async with open_backend(name, backend_settings(config, name)) as backend:
                await backend.list_owned()
        except SandboxError as error:
            if os.environ.get("CI"):
                raise
            found[name] = str(error)
    return found


def _image(backend: str) -> str:
    """The image of small tools, as this backend names it."""
    match backend:
        case "docker":
            import docker_engine  # noqa: PLC0415 - a laptop without an engine has no use for it

            return docker_engine.root_image()
        case "bubblewrap":
            return str(images.root_tree(JAIL_UID if os.getuid() == 0 else None))
    return ""


@asynccontextmanager
async def open_matrix(folder: Path) -> AsyncIterator[Matrix]:
    """Gateway, relay and a worker of every stage, for the time of the block."""
    async with open_rig(folder) as rig:
        (folder / "secret").write_bytes(SECRET)
        config = Config(
            nats=NatsConfig(url=rig.nats),
            store=StoreConfig(data=str(folder), blobs=str(folder / "blobs")),
            gateway=GatewayConfig(url=rig.gateway.url),
            relay=RelayConfig(start=False),  # it is here, and a worker that stops starts no other one
            # Two of these at one engine have the same secret: neither shall sweep the other's sandboxes.
            backends={"docker": {"installation": uuid4().hex[:12]}},
        )
        unusable = await _unusable(config)
        backends = tuple(name for name in BACKENDS if name not in unusable)
        named = {name: await asyncio.to_thread(_image, name) for name in backends}
        config = structs.replace(config, worker=WorkerConfig(backends=backends, slots=SLOTS, max_ready=SLOTS))
        stop = asyncio.Event()
        async with (
            relay_service(config.relay_dir(), config.nats.url, config.limits, drain_s=1.0),
            asyncio.TaskGroup() as group,
        ):
            worker = group.create_task(run_worker(config, ("admit", "init", "run", "eval", "aggregate"), SLOTS, stop))
            try:
                yield Matrix(rig, named, unusable, worker)
            finally:
                stop.set()
        for name in backends:
            await _clear(config, name)


async def _clear(config: Config, name: str) -> None:
    """Destroy what a run that was broken off has left."""
    async with open_backend(name, backend_settings(config, name)) as backend:
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()
