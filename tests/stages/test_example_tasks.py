"""The ten tasks of docs/examples/tasks through the whole pipeline: with their solution reward 1, with nobody 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import images
import pytest
from msgspec import structs

from rollyard.gateway.relay.service import serve_relay
from rollyard.pipeline.config import WorkerConfig
from rollyard.pipeline.importers.harbor import HarborOptions, import_harbor
from rollyard.pipeline.importers.harbor_folder import find_folders
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.task import Task
from rollyard.stages.plugin_check import check_task
from rollyard.stages.sandbox import BACKENDS, open_backend
from rollyard.stages.worker import backend_settings

TASKS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "tasks"
IMAGE = "rollyard-tests-tasks"
JAIL_UID = 64_042
SLOTS = 4
WAIT_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _without(why: str) -> None:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def _docker_image() -> str:
    import docker  # noqa: PLC0415 - a laptop without an engine has no use for it

    client = docker.from_env(timeout=120)
    tag = images.root_tar().stem
    if not client.images.list(f"{IMAGE}:{tag}"):
        client.api.import_image(str(images.root_tar()), repository=IMAGE, tag=tag)
    client.close()
    return f"{IMAGE}:{tag}"


async def _image(backend: str) -> str:
    if why := images.missing():
        _without(why)
    if backend == "docker":
        return await asyncio.to_thread(_docker_image)
    return str(await asyncio.to_thread(images.root_tree, JAIL_UID if os.getuid() == 0 else None))


def _tasks(backend: str, image: str, stand_in: Any) -> list[Task]:
    able = BACKENDS.load(backend).capabilities
    options = HarborOptions(
        backend=backend,
        builds=able.builds,
        workdirs=able.workdirs,
        networks=able.networks,
        image=image,
        stand_in=stand_in,
    )
    tasks = import_harbor([TASKS], options).result(check_task)
    return [structs.replace(task, id=f"{task.id} {stand_in}", max_attempts=1) for task in tasks]


@asynccontextmanager
async def _working(crew: Any, backend: str) -> AsyncIterator[None]:
    """A worker of every stage, with the one backend, and a relay."""
    config = structs.replace(crew.config, worker=WorkerConfig(backends=(backend,)))
    try:
        async with open_backend(backend, backend_settings(config, backend)) as opened:
            await opened.list_owned()
    except SandboxError as error:
        _without(str(error))
    crew.config = config
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_relay(config, stop))
        try:
            async with crew.at_work("admit", "init", "run", "eval", "aggregate", slots=SLOTS):
                yield
        finally:
            stop.set()


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
async def test_the_solution_of_each_task_is_right_and_nothing_is_wrong(crew: Any, backend: str) -> None:
    image = await _image(backend)
    tasks = [task for stand_in in ("oracle", "nothing") for task in _tasks(backend, image, stand_in)]
    assert len(tasks) == 20
    async with _working(crew, backend):
        await crew.submit(*tasks)

        async def delivered() -> Any:
            found = await crew.deliveries()
            return found if len(found) == len(tasks) else None

        async with asyncio.timeout(WAIT_S):
            deliveries = await crew.until(delivered)
    wrong = {
        delivery.task_id: (delivery.status, delivery.reward, delivery.rewards, delivery.failure)
        for delivery in deliveries
        if delivery.status != "completed" or delivery.reward != float(delivery.task_id.endswith("oracle"))
    }
    assert wrong == {}
    async with open_backend(backend, backend_settings(crew.config, backend)) as opened:
        rollouts = {delivery.rollout_id for delivery in deliveries}
        assert [labels for _, labels in await opened.list_owned() if labels.rollout_id in rollouts] == []


def test_there_are_ten_tasks_each_with_a_solution() -> None:
    folders = list(find_folders([TASKS]))
    assert len(folders) == 10
    for folder in folders:
        for name in ("instruction.md", "environment", "tests/test.sh", "solution/solve.sh"):
            assert (folder / name).exists(), f"{folder.name} has no {name}"
