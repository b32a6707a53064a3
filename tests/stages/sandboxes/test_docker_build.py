"""Images from a task's Dockerfile, with a real engine and a base image of this machine's files."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import docker_engine
import pytest

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import ImageBuild
from rollyard.stages.sandbox import Labels, Plan
from rollyard.stages.sandboxes.docker import DockerBackend
from rollyard.stages.sandboxes.docker_build import context_archive

LABELS = Labels(run="run", rollout_id="r0123", attempt=1, owner="worker", created_ms=5)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    docker_engine.require()
    settings = {"root": str(tmp_path), "installation": uuid.uuid4().hex, "pull": False}
    async with DockerBackend.from_settings(settings) as backend:
        yield backend
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


def a_build(*lines: str, **more: object) -> ImageBuild:
    text = "\n".join([f"FROM {docker_engine.root_image()}", f"LABEL unique={uuid.uuid4().hex}", *lines])
    return ImageBuild(dockerfile=text, **more)  # type: ignore[arg-type]


async def test_an_image_is_built_once_a_content(backend: DockerBackend, tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "from-folder").write_text("folder")
    (tmp_path / "context" / "ignored").write_text("x")
    (tmp_path / "context" / ".dockerignore").write_text("ignored\n")
    build = a_build(
        "ARG WHO", "COPY . /here/", "RUN echo built by $WHO >/here/said", "WORKDIR /here", "USER agent",
        files={"a/b": "é"}, context=str(tmp_path / "context"), args={"WHO": "me"},
    )  # fmt: skip
    lines: list[str] = []
    image = await backend.build(build, lines.append)
    assert any("RUN echo built" in line for line in lines)
    try:
        sandbox = await backend.create(LABELS, Plan(image=image, network="none"))
        done = await sandbox.exec("pwd; cat said a/b from-folder; echo; ls; id -u", timeout_s=30)
        assert done.stdout.decode().split() == [
            "/here",
            "built",
            "by",
            "me",
            "éfolder",
            "Dockerfile.rollyard",
            "a",
            "from-folder",
            "said",
            "1000",
        ]
        again: list[str] = []
        assert await backend.build(build, again.append) == image
        assert again == [f"{image} is there already"]
        (tmp_path / "context" / "from-folder").write_text("changed")
        assert context_archive(build) != context_archive(ImageBuild(dockerfile=build.dockerfile))
        await sandbox.destroy()
    finally:
        await backend.engine.call(lambda client: client.remove_image(image, force=True))


async def test_a_step_that_fails_is_told_with_its_last_lines(backend: DockerBackend) -> None:
    with pytest.raises(SandboxError, match=r"(?s)the-last-word.*returned a non-zero code: 7"):
        await backend.build(a_build("RUN echo the-last-word; exit 7"), lambda line: None)
    with pytest.raises(SandboxError, match="NONSENSE"):
        await backend.build(a_build("NONSENSE x"), lambda line: None)
    with pytest.raises(SandboxError, match="no-such-base"):
        await backend.build(ImageBuild(dockerfile="FROM no-such-base-image:1\n"), lambda line: None)
    with pytest.raises(SandboxError, match="no folder"):
        await backend.build(a_build("RUN true", context="/no/such/folder"), lambda line: None)
    with pytest.raises(SandboxError, match="leaves"):
        await backend.build(a_build("RUN true", files={"../x": ""}), lambda line: None)


async def test_a_cancelled_build_ends(backend: DockerBackend) -> None:
    nap = f"1000.{uuid.uuid4().int % 10**9}"
    task = asyncio.create_task(backend.build(a_build(f"RUN sleep {nap}"), lambda line: None))

    def running() -> bool:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"sleep\0{nap}" in (entry / "cmdline").read_text():
                    return True
            except (OSError, UnicodeDecodeError):
                continue
        return False

    async with asyncio.timeout(30):
        while not running():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):
        while running():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def test_the_same_content_is_the_same_archive_whatever_its_times(tmp_path: Path) -> None:
    archives = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "file").write_text("x")
        os.utime(folder / "sub" / "file", (time.time() - len(archives) * 1000,) * 2)
        archives.append(context_archive(ImageBuild(dockerfile="FROM x", context=str(folder), files={"b": "c"})))
    assert archives[0] == archives[1]
