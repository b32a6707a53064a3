"""INIT and RUN in real sandboxes of every kind: what stages do must not depend on where the agent works."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker_engine
import images
import pytest

from rollyard.pipeline.consumer import Ack
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.sandbox import Repository, SandboxSpec, SetupStep
from rollyard.schemas.task import AgentSpec, HookSpec, Task, Timeouts
from rollyard.stages.init import Init
from rollyard.stages.preparation import let_go
from rollyard.stages.run import Run
from rollyard.stages.sandbox import open_backend
from rollyard.stages.sandboxes import jail_setup
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID
from rollyard.stages.stage import StageHandler


@dataclass
class Place:
    """A crew with one more backend."""

    crew: Any
    backend: str
    image: str = ""

    def spec(self, **fields: Any) -> SandboxSpec:
        network = "default" if self.backend == "local" else "none"
        return SandboxSpec(backend=self.backend, image=self.image, network=network, **fields)

    def task(self, script: str, *, sandbox: dict[str, Any] | None = None, agent: Any = None, **fields: Any) -> Task:
        arguments = {"command": ["sh", "-c", script]}
        return Task(
            prompt="p",
            id="t",
            agent=AgentSpec(harness="command", args=arguments, **(agent or {})),
            sandbox=self.spec(**(sandbox or {})),
            **fields,
        )

    async def ready(self, task: Task) -> tuple[RolloutState, Any]:
        state = await self.crew.start(task)
        (held,) = await self.crew.take("init", task.sandbox.backend)
        assert await StageHandler(self.crew.context, Init(self.crew.context))(held) == Ack()
        await held.ack()
        after = await self.crew.state(state.rollout)
        assert after.position == "run", (await self.crew.life(state.rollout))[-1].failure
        (due,) = await self.crew.take("run", after.place)
        return after, due

    async def run(self, due: Any) -> None:
        assert await StageHandler(self.crew.context, Run(self.crew.context))(due) == Ack()

    async def ran(self, task: Task) -> tuple[RolloutState, Any]:
        state, due = await self.ready(task)
        await self.run(due)
        return await self.crew.state(state.rollout), (await self.crew.life(state.rollout))[-1]

    def kept(self, event: Any) -> dict[str, bytes]:
        return {each.name: self.crew.bus.blobs.get(each.blob) for each in event.result.artifacts}


def skip(why: str) -> None:
    if why:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


@pytest.fixture(params=["local", "bubblewrap", "docker"])
async def place(request: pytest.FixtureRequest, crew: Any, tmp_path: Path) -> AsyncIterator[Place]:
    name: str = request.param
    if name == "local":
        yield Place(crew, name)
        return
    settings: dict[str, Any] = {"root": str(tmp_path / name)}
    image = ""
    if name == "bubblewrap":
        skip(images.missing())
        try:
            jail_setup.find_tools()
        except Exception as error:  # noqa: BLE001 - whatever is missing here
            skip(str(error))
        image = str(images.root_tree(DEFAULT_UID if os.getuid() == 0 else None))
        settings["images"] = str(tmp_path / "images")
    else:
        docker_engine.require()
        settings |= {"installation": uuid.uuid4().hex, "image": docker_engine.root_image(), "pull": False}
    async with open_backend(name, settings) as backend:
        crew.context.backends = {**crew.context.backends, name: backend}
        yield Place(crew, name, image)
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


@pytest.fixture
def upstream(tmp_path: Path) -> str:
    folder = tmp_path / "upstream"
    script = f"""
        git init -q -b main {folder} && cd {folder} && mkdir src && echo one > src/a && ln -s /etc/passwd link
        printf '#!/bin/sh\\necho ran' > tool && chmod +x tool
        git add -A && git commit -qm one && git tag wanted && echo two > src/a && git commit -qam two
    """
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["sh", "-ec", script], check=True, env=os.environ | identity)
    return folder.as_uri()


async def test_from_a_repository_to_a_diff(place: Place, upstream: str) -> None:
    task = place.task(
        "git status --porcelain; cat src/a; ./tool; echo changed > src/a; echo new > made; mkdir out;"
        " echo 1 > out/x.json;"
        " ln -s /etc/passwd out/y.json; echo note >&2",
        sandbox={
            "repository": Repository(url=upstream, commit="wanted"),
            "files": {"extra": "file"},
            "setup": (SetupStep(run="git log --format=%s > .git/seen; cat extra >> .git/seen; exit 0", max_tries=2),),
        },
        outputs=("out/*.json", ".git/seen"),
        hooks=(HookSpec(hook="git_diff"), HookSpec(hook="resources", args={"period_s": 0.1})),
    )
    state, event = await place.ran(task)
    assert (state.position, state.status) == ("eval", "completed"), event
    assert event.result.answer == "?? extra\none\nran"
    kept = place.kept(event)
    assert kept["stderr.log"] == b"note\n"
    assert kept["out/x.json"] == b"1\n"
    assert kept[".git/seen"] == b"one\nfile"
    assert set(kept) == {"stdout.log", "stderr.log", "out/x.json", ".git/seen", "changes.diff"}
    diff = kept["changes.diff"]
    assert b"-one\n+changed" in diff
    assert b"+new" in diff
    assert b"extra" not in diff
    assert event.result.metrics["diff_files"] == 4
    assert event.result.metrics["stats_samples"] >= 1
    assert event.result.metadata == {}


async def test_a_second_worker_attaches(place: Place) -> None:
    state, due = await place.ready(place.task("echo begun >> ledger; sleep 3; wc -l < ledger", outputs=("ledger",)))
    first = asyncio.create_task(place.run(due))
    backend = place.crew.context.backends[place.backend]
    sandbox = await backend.open(state.sandbox)

    async def begun() -> bool:
        return await sandbox.read_file("ledger", 100) is not None

    await place.crew.until(begun)
    await let_go(sandbox)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await place.run(replace(due, deliveries=2))
    after, event = await place.crew.state(state.rollout), (await place.crew.life(state.rollout))[-1]
    assert (after.position, after.attempt) == ("eval", 1)
    assert event.result.answer == "1"
    assert place.kept(event)["ledger"] == b"begun\n"


async def test_idle_and_late_agents_are_ended_with_what_they_have(place: Place) -> None:
    task = place.task("echo half > out; trap '' TERM; echo said; sleep 600", agent={"max_idle_s": 2}, outputs=("out",))
    state, event = await place.ran(task)
    assert state.failure is not None
    assert state.failure.message == "idle: no model call and no output for 2 s"
    assert event.result.answer == "said"
    assert place.kept(event)["out"] == b"half\n"


async def test_the_deadline(place: Place) -> None:
    state, event = await place.ran(place.task("echo said; sleep 600", timeouts=Timeouts(run_s=2)))
    assert state.failure is not None
    assert (state.status, state.failure.message) == ("truncated", "the agent was still running after 2 s")
    assert event.result.answer == "said"


async def test_a_setup_that_hangs_leaves_nothing(place: Place) -> None:
    spec = {"setup": ("echo last; setsid sleep 600 & sleep 600",)}
    task = place.task("true", sandbox=spec, timeouts=Timeouts(init_s=4), max_attempts=1)
    state = await place.crew.start(task)
    (held,) = await place.crew.take("init", task.sandbox.backend)
    assert await StageHandler(place.crew.context, Init(place.crew.context))(held) == Ack()
    after = await place.crew.state(state.rollout)
    assert after.failure is not None
    assert after.failure.message == "setup command 1 was still running when the 4 s of INIT were over: last"
    assert await place.crew.context.backends[place.backend].list_owned() == []


async def test_an_image_that_is_not_there(place: Place) -> None:
    if place.backend == "local":
        pytest.skip("it has no images")
    spec = SandboxSpec(backend=place.backend, image="nothing/of-that-name:1", network="none")
    task = Task(prompt="p", id="t", agent=AgentSpec(harness="command", args={"command": ["true"]}), sandbox=spec)
    state = await place.crew.start(task)
    (held,) = await place.crew.take("init", place.backend)
    assert await StageHandler(place.crew.context, Init(place.crew.context))(held) == Ack()
    (event,) = await place.crew.life(state.rollout)
    assert event.failure.kind == "init"
    assert "nothing/of-that-name" in event.failure.message
    assert await place.crew.context.backends[place.backend].list_owned() == []
