"""Bad images, repositories, setups and agents through the whole pipeline, in sandboxes of every kind: each ends as what
it is, every group closes, and nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker_engine
import images
import pytest
from abuses import ABUSES, Abuse
from msgspec import json, structs
from outcome import read
from yard import Yard, config_for, yard

from rollyard.pipeline.config import Config, RelayConfig
from rollyard.schemas import subjects
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sample import Delivery
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import Task
from rollyard.stages.sandbox import open_backend
from rollyard.stages.sandboxes import jail_setup
from rollyard.stages.sandboxes.docker_labels import INSTALLATION
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID
from rollyard.stages.worker import backend_settings, installation

SLOTS = 4
PATIENCE_S = 240.0
GONE_WITHIN_S = 60.0
"""After the last delivery: half a minute of grace, a sweep every quarter, and what removing takes."""
RUN = "abuse"


@dataclass(frozen=True)
class Place:
    """One backend of this machine, with an image of its own files."""

    backend: str
    settings: dict[str, Any]
    image: str = ""

    def task(self, abuse: Abuse, tag: str) -> Task:
        network = "default" if self.backend == "local" else "none"
        isolated = "" if self.backend == "local" else "yes"
        spec = SandboxSpec(**{"backend": self.backend, "image": self.image, "network": network, **abuse.sandbox})
        task = Task(
            id=abuse.name,
            prompt=abuse.prompt,
            agent=abuse.agent(tag),
            sandbox=structs.replace(spec, env={"ABUSE": tag, "ISOLATED": isolated, **spec.env}),
            evaluation=abuse.evaluation,
            timeouts=abuse.timeouts(),
            outputs=("out/*", "answer"),
            group_size=abuse.group_size,
            max_attempts=1,
        )
        text = json.encode(task).replace(b"TAG", tag.encode()).replace(b"FROM IMAGE", b"FROM " + self.base().encode())
        return json.decode(text, type=Task)

    def base(self) -> str:
        return str(self.settings.get("image", ""))


def place_of(backend: str, folder: Path) -> Place:
    """Skips, in CI fails, where there is no such backend."""
    if backend == "local":
        return Place(backend, {})
    lack = images.missing()
    if backend == "docker":
        docker_engine.require()
        return Place(backend, {"image": docker_engine.root_image(), "pull": False})
    try:
        jail_setup.find_tools()
    except SandboxError as error:
        lack = lack or str(error)
    if lack:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lack)
    image = str(images.root_tree(DEFAULT_UID if os.getuid() == 0 else None))
    return Place(backend, {"images": str(folder / "images")}, image)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["local", "bubblewrap", "docker"])
async def test_each_ends_as_what_it_is_and_nothing_is_left(backend: str, tmp_path: Path) -> None:
    place = place_of(backend, tmp_path)
    tag = f"abuse-{uuid.uuid4().hex}"
    abuses = {abuse.name: abuse for abuse in ABUSES if backend in abuse.backends}
    tasks = [place.task(abuse, tag) for abuse in abuses.values()]
    config = structs.replace(
        # Nobody dies here but agents: no worker may be taken for dead on a machine that has more to do.
        config_for(tmp_path, slots=SLOTS, backends=(backend,), lease_s=90.0, ack_wait_s=60.0, heartbeat_s=10.0),
        backends={backend: place.settings} if place.settings else {},
        relay=RelayConfig(start=False),
    )
    async with yard(tmp_path, ("gateway", "controller"), config=config) as running:
        running.start("stages", "worker", "--stages", "admit,init,run,eval,aggregate")
        try:
            await running.submit(RUN, tasks)
            wanted = sum(task.group_size for task in tasks)
            await running.wait_delivered(RUN, wanted, PATIENCE_S)
            await check_groups_close(running, len(tasks))
            outcome = await read(running, RUN)
            wrong = [said for each in outcome.deliveries if (said := differs(abuses[each.task_id], each))]
            assert wrong == []
            await check_nothing_is_left(running, place, config, tag)
        finally:
            await remove_all(place, config, tag)


def differs(abuse: Abuse, delivery: Delivery) -> str:
    """In what way a rollout did not end as it must; empty: it did."""
    kind = delivery.failure.kind if delivery.failure else None
    message = delivery.failure.message if delivery.failure else ""
    if kind == abuse.failure and abuse.says in message and delivery.reward == abuse.reward:
        return ""
    return (
        f"{abuse.name}: {delivery.status}, {kind}: {message}; reward {delivery.reward}; answer {delivery.answer[:80]!r}"
    )


async def check_groups_close(running: Yard, count: int) -> None:
    async def closed() -> bool:
        return len(await running.bus.subjects(subjects.SAMPLES, f"group.{subjects.token(RUN)}.*")) == count

    await running.until(closed, "the groups to close")


async def check_nothing_is_left(running: Yard, place: Place, config: Config, tag: str) -> None:
    """No process, sandbox, folder, mount and container."""
    until = time.monotonic() + GONE_WITHIN_S
    while any((left := await what_is_left(running, place, config, tag)).values()):
        assert time.monotonic() < until, left
        await asyncio.sleep(1)


async def what_is_left(running: Yard, place: Place, config: Config, tag: str) -> dict[str, list[str]]:
    return {
        "processes": processes_of(tag) + running.agents(),
        "sandboxes": [str(ref) for ref in await owned(place, config)],
        "folders": folders_in(config.sandboxes_dir()),
        "mounts": mounts_below(running.folder),
        "engine": await asyncio.to_thread(in_engine, tag, config) if place.backend == "docker" else [],
    }


def processes_of(tag: str) -> list[str]:
    """Processes of the machine that carry the tag, in whatever namespace they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            try:
                if tag.encode() in (path / name).read_bytes():
                    found.append(f"{path.name}: {(path / 'cmdline').read_bytes()[:200]!r}")
                    break
            except OSError:
                continue
    return found


def folders_in(folder: Path) -> list[str]:
    """Folders of sandboxes. Jails are in one of their own."""
    folders = [each for each in (folder, folder / "bubblewrap") if each.is_dir()]
    names = {path.name for each in folders for path in each.iterdir()}
    return sorted(names - {"lease", "owners", "bubblewrap"})


def mounts_below(folder: Path) -> list[str]:
    """Mounts of this process's namespace below a folder."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


def in_engine(tag: str, config: Config) -> list[str]:
    """Containers that carry the tag, which those of a build's steps do too, or this installation's label."""
    import docker  # noqa: PLC0415 - a laptop without an engine has no use for it

    labels = (f"abuse={tag}", f"{INSTALLATION}={installation(config.secret({}))}")
    client: Any = docker.APIClient(version="auto", timeout=60)
    try:
        return [
            f"container {each['Names']}"
            for label in labels
            for each in client.containers(all=True, filters={"label": label})
        ]
    finally:
        client.close()


def with_installation(place: Place, config: Config) -> dict[str, Any]:
    settings = backend_settings(config, place.backend)
    return settings if place.backend == "local" else settings | {"installation": installation(config.secret({}))}


async def owned(place: Place, config: Config) -> list[SandboxRef]:
    async with open_backend(place.backend, with_installation(place, config)) as opened:
        return [ref for ref, _ in await opened.list_owned()]


async def remove_all(place: Place, config: Config, tag: str) -> None:
    """After a test that failed too."""
    async with open_backend(place.backend, with_installation(place, config)) as opened:
        for ref, _ in await opened.list_owned():
            await (await opened.open(ref)).destroy()
    for line in processes_of(tag):
        with suppress(ProcessLookupError):
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
