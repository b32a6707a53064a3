"""Containers that are kept ready, with a real engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import docker_engine
import pytest
from msgspec import structs

from rollyard.harnesses.harness import Command
from rollyard.stages.sandbox import Labels, Plan, ProcessEnd
from rollyard.stages.sandboxes.docker import DockerBackend
from rollyard.stages.sandboxes.docker_sandbox import DockerSandbox

LABELS = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)
QUIET = Plan(network="none")


def a_backend(folder: Path, installation: str, warm: int) -> DockerBackend:
    image = docker_engine.root_image()
    return DockerBackend.from_settings(
        {"root": str(folder), "installation": installation, "image": image, "pull": False, "warm": warm}
    )


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    docker_engine.require()
    async with a_backend(tmp_path, uuid.uuid4().hex, 2) as backend:
        yield backend
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


async def warm(backend: DockerBackend, count: int) -> None:
    """Wait until so many are ready."""
    async with asyncio.timeout(30):
        while sum(len(kind.ready) for kind in backend._pool._kinds.values()) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def deadline_of(sandbox: DockerSandbox) -> str:
    return (await sandbox.exec("cat /rollyard/control-*/deadline", timeout_s=30)).stdout.decode().strip()


async def test_a_ready_container_is_claimed_with_labels_and_deadline_of_its_own(backend: DockerBackend) -> None:
    first = await backend.create(LABELS, QUIET)
    await warm(backend, 2)
    owned = dict(await backend.list_owned())
    assert sorted(labels.role for labels in owned.values()) == ["agent", "warm", "warm"]
    assert {labels.owner for labels in owned.values()} == {"worker"}
    claimed = await backend.create(
        structs.replace(LABELS, rollout_id="r2", role="eval"), Plan(network="none", deadline_s=500)
    )
    assert owned[claimed.ref].role == "warm"
    assert dict(await backend.list_owned())[claimed.ref] == structs.replace(LABELS, rollout_id="r2", role="eval")
    assert await deadline_of(claimed) == "fixed 500"
    assert claimed.ref != first.ref
    # Somebody else opens it as any other.
    again = await backend.open(claimed.ref)
    await again.start("agent", Command(("true",)), deadline_s=30)
    assert await again.wait("agent") == ProcessEnd(0, "exited")
    await warm(backend, 2)


async def test_a_claimed_container_ends_at_its_own_deadline_whatever_an_agent_says(backend: DockerBackend) -> None:
    await (await backend.create(LABELS, QUIET)).destroy()
    await warm(backend, 2)
    claimed = await backend.create(LABELS, Plan(network="none", deadline_s=3))
    await claimed.exec("echo 'fixed 9999' >/rollyard/control-*/deadline; kill -USR1 1", timeout_s=30)
    async with asyncio.timeout(30):
        while claimed.ref in dict(await backend.list_owned()):  # noqa: ASYNC110 - the engine is looked at
            await asyncio.sleep(0.1)


async def test_only_sandboxes_of_the_same_kind_are_claimed(backend: DockerBackend) -> None:
    await backend.create(LABELS, QUIET)
    await warm(backend, 2)
    known = {ref.handle for ref, _ in await backend.list_owned()}
    other = await backend.create(LABELS, Plan(network="none", user="agent"))
    assert other.ref.handle not in known
    assert (await other.exec("id -u", timeout_s=30)).stdout == b"1000\n"
    await warm(backend, 4)


async def test_a_ready_container_that_is_gone_is_passed_over(backend: DockerBackend) -> None:
    await backend.create(LABELS, QUIET)
    await warm(backend, 2)
    for ref, labels in await backend.list_owned():
        if labels.role == "warm":
            await backend.engine.call(lambda client, ref=ref: client.remove_container(ref.handle, force=True))
    assert (await (await backend.create(LABELS, QUIET)).exec("echo on", timeout_s=30)).stdout == b"on\n"


async def test_ready_containers_live_on_with_their_worker_and_end_with_it(tmp_path: Path) -> None:
    docker_engine.require()
    installation = uuid.uuid4().hex
    async with a_backend(tmp_path, installation, 0) as witness:
        async with a_backend(tmp_path, installation, 1) as backend:
            sandbox = await backend.create(LABELS, QUIET)
            await warm(backend, 1)
            ready = next(iter(backend._pool._kinds.values())).ready[0]
            backend._pool._now = lambda: ready.renewed_s + 60
            await backend.renew_lease()
            assert await deadline_of(ready.sandbox) == "at 120"
            # Very old ones are replaced.
            backend._pool._now = lambda: ready.made_s + 10_000
            await backend.renew_lease()
            async with asyncio.timeout(30):
                while ready.sandbox.ref in dict(await backend.list_owned()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert [labels.role for _, labels in await witness.list_owned()] == ["agent"]
        await (await witness.open(sandbox.ref)).destroy()


async def test_a_ready_container_ends_soon_after_its_worker(backend: DockerBackend) -> None:
    await backend.create(LABELS, QUIET)
    await warm(backend, 2)
    ready = next(iter(backend._pool._kinds.values())).ready[0]
    await ready.sandbox.set_deadline(1, fixed=False)  # what is left of its 120 s when nobody renews it
    async with asyncio.timeout(30):
        while ready.sandbox.ref in dict(await backend.list_owned()):  # noqa: ASYNC110 - the engine is looked at
            await asyncio.sleep(0.1)
