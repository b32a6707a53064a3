"""One instance of Apptainer: what inside.sh does not do by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.sandbox import Change, Plan, Stats
from rollyard.stages.sandboxes.apptainer_command import HOME, RELAY, WORKDIR
from rollyard.stages.sandboxes.apptainer_stream import ApptainerEntrance
from rollyard.stages.sandboxes.door import GATEWAY_URL, SOCKET_NAME, forwarder_argv
from rollyard.stages.sandboxes.forwarding import start_forwarder
from rollyard.stages.sandboxes.inside import Inside, InsideSandbox

if TYPE_CHECKING:
    from rollyard.stages.sandboxes.apptainer import ApptainerBackend

CONTROL: Final = "/tmp/.rollyard"
MAX_FILE_BYTES: Final = 256 << 20


class Made(Struct, frozen=True, kw_only=True):
    """What a sandbox was made with, as far as whoever opens it must know it. It stands in the sandbox's folder."""

    workdir: str = WORKDIR
    gateway: bool = False
    max_file_bytes: int = MAX_FILE_BYTES

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """As a plan wants it."""
        most = plan.limits.max_file_bytes or MAX_FILE_BYTES
        return cls(workdir=plan.workdir or WORKDIR, gateway=plan.network == "gateway", max_file_bytes=most)


class ApptainerSandbox(InsideSandbox):
    """One folder under the backend's root, and the instance of that name."""

    def __init__(self, backend: ApptainerBackend, folder: Path, made: Made) -> None:
        self._backend = backend
        self._folder = folder
        self.gateway_url = GATEWAY_URL if made.gateway else None
        inside = Inside(
            handle=folder.name,
            workdir=made.workdir,
            home=HOME,
            control=CONTROL,
            max_file_bytes=made.max_file_bytes,
        )
        super().__init__(ApptainerEntrance(backend.settings.program, folder.name, backend.children), inside)

    @property
    def ref(self) -> SandboxRef:
        """The handle is the folder's path."""
        return self._backend.root.ref(self._folder)

    async def prepare(self, deadline_s: float) -> None:
        """Let the gateway be reached. Raises SandboxError."""
        if self.gateway_url is not None:
            await start_forwarder(self, forwarder_argv(f"{RELAY}/{SOCKET_NAME}"), deadline_s=deadline_s)

    async def snapshot(self) -> str:
        """Raises SandboxError."""
        raise SandboxError("the backend 'apptainer' keeps no snapshots")

    async def diff(self) -> list[Change]:
        """Raises SandboxError."""
        raise SandboxError("the backend 'apptainer' cannot tell what differs from the image", hint="use git inside")

    async def set_network(self, mode: NetworkMode, allow_hosts: Sequence[str] = ()) -> None:
        """Raises SandboxError."""
        raise SandboxError("the backend 'apptainer' cannot change a network once it is made")

    async def stats(self) -> Stats:
        """Nothing is known."""
        return Stats()

    async def destroy(self) -> None:
        """Kill what runs and remove the folder. Does nothing when it is gone."""
        await self.close_channels()
        await self._backend.stop(self._folder)
