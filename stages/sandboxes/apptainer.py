"""Sandbox backend `apptainer`: an instance of Apptainer (or SingularityCE) for each sandbox, without root.

**Never run**: the program could not be had where this was written. Its command lines are tested as text. Whoever uses
it first should run `rollyard sandbox check apptainer`, and tell us.

    <root>/apptainer/lease                  renewed by workers; keepers stop their instances when it is not
    <root>/apptainer/<instance>/            one sandbox, from before its instance is started
        labels.json  home/  work/  tmp/  overlay/

The instance's network is empty but for its own loopback. There a forwarder carries 127.0.0.1:8400 to the relay's
socket, whose folder is bound into the instance.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Self

import msgspec
import structlog
from msgspec import Meta

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import DEFAULT_PLAN, Labels, Plan
from rollyard.stages.sandboxes.apptainer_command import Instance, image_of, list_argv, listed, start_argv, stop_argv
from rollyard.stages.sandboxes.apptainer_sandbox import ApptainerSandbox, Made
from rollyard.stages.sandboxes.door import shared_folder
from rollyard.stages.sandboxes.files import remove_tree
from rollyard.stages.sandboxes.folder import SandboxRoot, put_aside, this_machine
from rollyard.stages.sandboxes.settings import BackendSettings
from rollyard.stages.sandboxes.shim import Children

log = structlog.get_logger(__name__)

TESTED: Final = "never run: only its command lines are tested"
KEEPER: Final = Path(__file__).with_name("apptainer_keeper.sh")
COMMAND_S: Final = 120.0
MADE: Final = "sandbox.json"


class ApptainerSettings(BackendSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the backend `apptainer`."""

    program: Annotated[str, Meta(min_length=1, description="apptainer, or singularity")] = "apptainer"
    image: Annotated[str, Meta(description="image of tasks that name none")] = ""
    images: Annotated[str, Meta(description="folder of images that tasks name by a relative path")] = "/"
    start_s: Annotated[float, Meta(gt=0, description="time limit of starting an instance")] = COMMAND_S


class ApptainerBackend:
    """Makes instances on this machine."""

    name = "apptainer"
    capabilities = Capabilities(
        # It is meant to isolate; nobody has seen it do so.
        isolated=False,
        images=True,
        workdirs=True,
        read_only=True,
        networks=frozenset({"gateway", "none", "open"}),
        limits=(("max_file_bytes", "hard"),),
        mounts="bind",
        tested=TESTED,
    )

    def __init__(self, settings: ApptainerSettings) -> None:
        self.place = this_machine(self.name)
        self.settings = settings
        self.children = Children()
        self.root = SandboxRoot(self.name, self.place, Path(settings.root).absolute() / self.name)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Settings are those of `ApptainerSettings`. Raises ConfigError."""
        return cls(ApptainerSettings.of(cls.name, settings))

    async def __aenter__(self) -> Self:
        if not shutil.which(self.settings.program):
            raise SandboxError(
                f"the program {self.settings.program!r} is not installed",
                hint="install Apptainer, or leave 'apptainer' out of [worker] backends",
            )
        self.root.prepare()
        log.warning("backend_never_run", backend=self.name, hint="run `rollyard sandbox check apptainer` first")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.children.close()

    def reaches(self, place: str) -> bool:
        """Only this boot of this machine, as this user."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> ApptainerSandbox:
        """Start an instance. Raises SandboxError."""
        made = Made.of(plan)
        image = image_of(plan.image or self.settings.image, Path(self.settings.images))
        folder = await asyncio.to_thread(self.root.make, labels, ("home", "work", "tmp", "overlay"))
        sandbox = ApptainerSandbox(self, folder, made)
        try:
            (folder / MADE).write_bytes(msgspec.json.encode(made))
            start = start_argv(self._instance(folder, image, plan))
            self._start_keeper(folder, plan.deadline_s)
            await run_checked(start, self.settings.start_s)
            await sandbox.prepare(plan.deadline_s)
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def open(self, ref: SandboxRef) -> ApptainerSandbox:
        """A sandbox of this place. Raises SandboxError."""
        folder = self.root.folder_of(ref)
        try:
            made = msgspec.json.decode((folder / MADE).read_bytes(), type=Made)
        except (OSError, msgspec.MsgspecError):
            made = Made()  # gone, or half-made: it can only be destroyed
        return ApptainerSandbox(self, folder, made)

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every sandbox under the root, also one whose instance has ended. Raises SandboxError."""
        return self.root.owned()

    async def renew_lease(self) -> None:
        """Touch the lease file. Raises SandboxError."""
        self.root.renew()

    async def stop(self, folder: Path) -> None:
        """Kill the instance of a sandbox, if there is one, and remove its folder. Raises SandboxError."""
        gone = put_aside(folder)
        if gone is None:
            return
        program = self.settings.program
        if folder.name in listed(await run_checked(list_argv(program, folder.name), COMMAND_S)):
            await run_checked(stop_argv(program, folder.name), COMMAND_S)
        await asyncio.to_thread(remove_tree, gone)

    def _instance(self, folder: Path, image: str, plan: Plan) -> Instance:
        relay = self.settings.relay
        if plan.network == "gateway" and not relay:
            raise SandboxError("there is no relay on this machine", hint="start one: `rollyard relay`")
        return Instance(
            program=self.settings.program,
            name=folder.name,
            image=image,
            home=folder / "home",
            tmp=folder / "tmp",
            work=None if plan.workdir else folder / "work",
            overlay=None if plan.read_only else folder / "overlay",
            network=plan.network,
            relay=shared_folder(Path(relay)) if plan.network == "gateway" else None,
            mounts=plan.mounts,
        )

    def _start_keeper(self, folder: Path, deadline_s: float) -> None:
        lease_s, left_s = max(1, round(self.settings.lease_s)), max(1, round(deadline_s))
        argv = ["sh", str(KEEPER), str(folder), str(self.root.lease), str(lease_s), str(left_s)]
        argv += stop_argv(self.settings.program, folder.name)
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        self.children.adopt(os.posix_spawn("/bin/sh", argv, os.environ, file_actions=nothing, setsid=True))


async def run_checked(argv: list[str], timeout_s: float) -> bytes:
    """Standard output of a command of apptainer. Raises SandboxError with what it said."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise SandboxError(f"{argv[0]} cannot be run: {error}", hint="is apptainer installed?") from error
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise SandboxError(f"`{' '.join(argv[:3])}` did not end within {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = stderr[-500:].decode(errors="replace").strip()
        raise SandboxError(f"`{' '.join(argv[:3])}` ended with {process.returncode}: {said}")
    return stdout
