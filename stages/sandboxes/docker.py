"""Sandbox backend `docker`: a container of a Docker engine, on this machine or another.

A container has no capabilities, cannot gain any, and reaches nothing but the gateway, if the task says nothing else.
Its first process is a small shell program that ends at the sandbox's deadline, and the container is removed with it, so
that nothing depends on a worker that lives on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import structlog

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import ImageBuild
from rollyard.schemas.subjects import digest
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import DEFAULT_PLAN, Labels, Plan
from rollyard.stages.sandboxes import docker_container
from rollyard.stages.sandboxes.docker_build import build_image
from rollyard.stages.sandboxes.docker_container import Image
from rollyard.stages.sandboxes.docker_engine import Engine, EngineGone
from rollyard.stages.sandboxes.docker_labels import (
    INSTALLATION,
    Facts,
    docker_labels,
    facts_of,
    is_rollout_id,
    name_of,
    owned,
)
from rollyard.stages.sandboxes.docker_pool import WarmPool
from rollyard.stages.sandboxes.docker_sandbox import DockerSandbox, remove
from rollyard.stages.sandboxes.docker_settings import DockerSettings
from rollyard.stages.sandboxes.docker_wire import EngineRefused
from rollyard.stages.sandboxes.door import check_relay
from rollyard.stages.sandboxes.inside_command import inside_argv

log = structlog.get_logger(__name__)

WARM_S: Final = 120
"""A container that is kept ready ends so long after its worker said last that it lives."""


class DockerBackend:
    """Makes sandboxes of one engine."""

    name = "docker"
    capabilities = Capabilities(
        isolated=True,
        images=True,
        builds=True,
        users=True,
        workdirs=True,
        read_only=True,
        networks=frozenset({"gateway", "none", "open"}),
        set_network=True,
        limits=(
            ("cpus", "hard"),
            ("memory_bytes", "hard"),
            ("disk_bytes", "hard"),
            ("max_processes", "hard"),
            ("max_file_bytes", "hard"),
        ),
        snapshots=True,
        diff=True,
        tty=True,
        mounts="bind",
    )

    def __init__(self, settings: DockerSettings) -> None:
        self.settings = settings
        self.engine = Engine(settings.base_url, settings.timeout_s)
        self._place = ""
        self._pool = WarmPool(self, settings.warm, settings.warm_kinds)
        self._endings: set[asyncio.Task[None]] = set()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Settings are those of `DockerSettings`. Raises ConfigError."""
        return cls(DockerSettings.of(cls.name, settings))

    @property
    def place(self) -> str:
        """The engine and the installation: the same on every machine that reaches the engine."""
        if not self._place:
            raise SandboxError("the docker backend is not open", hint="enter it with `async with`")
        return self._place

    async def __aenter__(self) -> Self:
        await self.engine.open()
        self._place = "docker-" + digest(self.engine.identity, self.settings.installation, chars=16)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.close()
        if self._endings:
            await asyncio.wait(self._endings)
        await self.engine.close()

    def reaches(self, place: str) -> bool:
        """Only sandboxes of this engine and installation."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> DockerSandbox:
        """Make a container, or claim one that is kept ready. Raises SandboxError."""
        if not is_rollout_id(labels.rollout_id):
            raise SandboxError(f"{labels.rollout_id!r} is no rollout id", hint="use Rollout.of")
        if plan.network == "gateway" and not self.settings.relay:
            raise SandboxError(
                "there is no relay that would carry the sandbox's calls to the gateway",
                hint="start the worker with one, or set sandbox.network to 'none' or 'open'",
            )
        if self.settings.relay and plan.network != "none":
            await check_relay(Path(self.settings.relay))
        whole = docker_container.filled(plan, await self._image(plan.image or self.settings.image), self.settings)
        ready = await self._pool.take(labels, whole)
        return ready if ready is not None else await self.make(labels, whole)

    async def make(self, labels: Labels, plan: Plan) -> DockerSandbox:
        """A new container for a filled plan, ready to be worked in. Raises SandboxError."""
        nonce = secrets.token_hex(8)
        name = name_of(labels, nonce)
        facts = docker_container.facts(plan, nonce, self.settings)
        made = asyncio.ensure_future(self.engine.call(self._maker(name, labels, plan, facts)))
        try:
            handle = await asyncio.shield(made)
            sandbox = self._sandbox(handle, facts)
            await sandbox.make_ready()
        except asyncio.CancelledError:
            # The call goes on in its thread.
            ending = asyncio.create_task(self._remove_when_made(name, made))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            raise
        except BaseException as error:
            await asyncio.shield(remove(self.engine, name))
            if isinstance(error, EngineGone | EngineRefused):
                raise _not_made(plan, error) from error
            raise
        return sandbox

    async def open(self, ref: SandboxRef) -> DockerSandbox:
        """A sandbox of this engine; whose container is gone, it raises SandboxError in all but `destroy`."""
        if ref.backend != self.name or not self.reaches(ref.place):
            raise SandboxError(
                f"the sandbox {ref.handle} is at {ref.place}, this worker at {self.place}",
                hint="a rollout whose place is gone moves to a new attempt",
            )
        try:
            found = await self.engine.call(lambda client: client.inspect_container(ref.handle))
        except EngineGone:
            return self._sandbox(ref.handle, Facts(nonce="gone", workdir="/", user=""))
        if (facts := facts_of(found["Config"].get("Labels") or {})) is None:
            raise SandboxError(f"{ref.handle!r} is no sandbox", hint="take the reference that `create` gave")
        return self._sandbox(found["Id"], facts)

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every container of this installation, running or not; one that is kept ready as whose worker made it."""
        filters = {"label": [f"{INSTALLATION}={self.settings.installation}"]}
        listed = await self.engine.call(lambda client: client.containers(all=True, filters=filters))
        found = ((entry["Id"], owned(entry["Names"] or [], entry["Labels"] or {})) for entry in listed)
        return [(self._ref(handle), labels) for handle, labels in found if labels is not None]

    async def renew_lease(self) -> None:
        """Containers that are kept ready live on; all others need nobody."""
        await self._pool.renew()

    async def build(self, build: ImageBuild, on_progress: Callable[[str], None]) -> str:
        """The name of an image of that content; built when there is none yet. Raises SandboxError."""
        return await build_image(self.engine, build, on_progress)

    # --- how

    def _ref(self, handle: str) -> SandboxRef:
        return SandboxRef(backend=self.name, place=self.place, handle=handle)

    def _sandbox(self, handle: str, facts: Facts) -> DockerSandbox:
        return DockerSandbox(self.engine, self._ref(handle), facts)

    async def _image(self, name: str) -> Image:
        if not name:
            raise SandboxError(
                "there is no image to make the sandbox of", hint="set sandbox.image, or [backends.docker] image"
            )
        try:
            return Image.of(await self.engine.call(lambda client: client.inspect_image(name)))
        except EngineGone as error:
            said = error.message
        if self.settings.pull:
            try:
                await self.engine.call(lambda client: client.pull(name, tag=None if _tagged(name) else "latest"))
                return Image.of(await self.engine.call(lambda client: client.inspect_image(name)))
            except (EngineGone, EngineRefused) as error:
                said = error.message
        raise SandboxError(
            f"there is no image {name!r}, and it cannot be fetched: {said}",
            hint="correct sandbox.image, or bring it there with `docker pull`, `docker load` or `docker import`",
        )

    def _maker(self, name: str, labels: Labels, plan: Plan, facts: Facts) -> Callable[[Any], str]:
        life_s = WARM_S if labels.role == "warm" else max(1, round(plan.deadline_s + 0.5))
        config = {
            "Image": plan.image,
            "Entrypoint": inside_argv(
                docker_container.control(facts), ["first", str(life_s), *docker_container.folders(facts)], binary=True
            ),
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Labels": docker_labels(
                labels,
                facts,
                installation=self.settings.installation,
                deadline_ms=int((time.time() + life_s) * 1000),
            ),
            "HostConfig": docker_container.host_config(plan, facts, self.settings),
        }

        def make(client: Any) -> str:
            made = client.create_container_from_config(config, name)
            client.start(made["Id"])
            return str(made["Id"])

        return make

    async def _remove_when_made(self, name: str, made: asyncio.Future[str]) -> None:
        await asyncio.wait([made])
        if not made.cancelled() and (error := made.exception()) is not None:
            log.info("cancelled_container_not_made", error=str(error))
        try:
            await remove(self.engine, name)
        except SandboxError as error:
            log.warning("cancelled_container_not_removed", name=name, error=str(error))


def _tagged(name: str) -> bool:
    return "@" in name or ":" in name.rpartition("/")[2]


def _not_made(plan: Plan, error: EngineGone | EngineRefused) -> SandboxError:
    """What a refusal means for whoever wrote the task."""
    said, hint = error.message, "see the log of the engine"
    if '"sh": executable file not found' in said:
        hint = "the image needs a POSIX sh, and more; see the docs of the docker backend"
    elif "storage-opt" in said or "--storage-opt" in said:
        hint = "this engine keeps no limits.disk_bytes but of a sandbox with read_only: true"
    elif "bind source path" in said:
        hint = "the folder must be on the engine's machine"
    return SandboxError(f"the container cannot be made: {said}", hint=hint)
