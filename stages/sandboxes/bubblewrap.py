"""Sandbox backend `bubblewrap`: a root tree, files and a network of its own, without a daemon and without root.

    <root>/bubblewrap/<rollout>.<attempt>.<nonce>/   one sandbox, as folder.py says
        jail.json                                    what all its processes have in common
        state/                                       where its holder mounts, unseen by others

A *holder* keeps the namespaces that hold files and network; each process is a jail of its own inside them, with process
ids of its own, so that whoever kills its first process kills all of it. Decision 7 says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.images.store import ImageStore
from rollyard.stages.sandbox import DEFAULT_PLAN, Labels, Plan
from rollyard.stages.sandboxes.door import Doors, check_relay
from rollyard.stages.sandboxes.folder import SandboxRoot, boot_id, nonce_of, this_machine
from rollyard.stages.sandboxes.jail import Tools, holder_line
from rollyard.stages.sandboxes.jail_holder import Holder
from rollyard.stages.sandboxes.jail_plan import Planned, plan_jail
from rollyard.stages.sandboxes.jail_sandbox import BubblewrapSandbox, read_jail
from rollyard.stages.sandboxes.jail_settings import BubblewrapSettings
from rollyard.stages.sandboxes.jail_setup import find_tools, holder_script, probe
from rollyard.stages.sandboxes.memory import MemoryWatch
from rollyard.stages.sandboxes.shim import ShimSettings
from rollyard.stages.sandboxes.shimmed import Host

IMAGES: Final = "images"


class BubblewrapBackend:
    """Makes jails on this machine. Entering it raises SandboxError when the machine cannot, with what to do."""

    name = "bubblewrap"
    capabilities = Capabilities(
        isolated=True,
        images=True,
        workdirs=True,
        read_only=True,
        networks=frozenset({"gateway", "none", "open"}),
        limits=(
            ("memory_bytes", "best_effort"),
            ("disk_bytes", "hard"),
            ("max_processes", "hard"),
            ("max_file_bytes", "hard"),
        ),
        snapshots=True,
        diff=True,
        tty=True,
        keeps_ends=True,
        mounts="bind",
    )

    def __init__(self, settings: BubblewrapSettings) -> None:
        self.place = this_machine(self.name)
        self.settings = settings
        self.root = Path(settings.root).absolute() / self.name
        self.images = ImageStore(Path(settings.images or Path(settings.root).absolute().parent / IMAGES))
        self.uid = settings.drop_to()
        self.shims = ShimSettings(
            lease=self.root / "lease",
            lease_s=settings.lease_s,
            boot_id=boot_id(),
            max_file_bytes=settings.max_file_bytes,
        )
        self.host = Host(self.shims)
        self.memory = MemoryWatch(settings.watch_s)
        self._doors = Doors(Path(settings.relay)) if settings.relay else None
        self._tools: Tools | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Settings are those of `BubblewrapSettings`. Raises ConfigError."""
        checked = BubblewrapSettings.of(cls.name, settings)
        for field in ("workdir", "home"):
            if not getattr(checked, field).startswith("/"):
                raise ConfigError(f"sandbox backend bubblewrap: {field} must be an absolute path")
        return cls(checked)

    @property
    def folders(self) -> SandboxRoot:
        """The folder of its sandboxes."""
        return SandboxRoot(self.name, self.place, self.root)

    @property
    def tools(self) -> Tools:
        """The programs that it runs. Raises SandboxError when the backend was not entered."""
        if self._tools is None:
            raise SandboxError("the backend 'bubblewrap' is not open", hint="use `async with`")
        return self._tools

    async def __aenter__(self) -> Self:
        self.folders.prepare(open_to_all=self.uid is not None)
        self._tools = await asyncio.to_thread(find_tools)
        await asyncio.to_thread(probe, self._tools, self.uid, self.root)
        self.memory.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.memory.stop()
        self.host.children.close()

    def reaches(self, place: str) -> bool:
        """Only this boot of this machine or container, as this user."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> BubblewrapSandbox:
        """Make a sandbox and start its holder. Raises SandboxError. When it is cancelled, nothing is left of it."""
        making = asyncio.ensure_future(self._create(labels, plan))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await (await making).destroy()
            raise

    async def _create(self, labels: Labels, plan: Plan) -> BubblewrapSandbox:
        if plan.network == "gateway":
            if self._doors is None:
                raise SandboxError(
                    "there is no relay, so nothing leads from a sandbox to the gateway",
                    hint="start one (`rollyard relay`) and set its folder, or set sandbox.network to 'none' or 'open'",
                )
            await check_relay(Path(self.settings.relay))
        folder = await asyncio.to_thread(self.folders.make, labels, ("state",), open_to_all=self.uid is not None)
        sandbox: BubblewrapSandbox | None = None
        try:
            planned = await asyncio.to_thread(self._plan, folder, plan)
            pid, said = self._start(folder, planned)
            self.host.children.adopt(pid)
            sandbox = BubblewrapSandbox(self, folder, planned.jail)
            await sandbox.holder.ready(said)
            if plan.network == "gateway" and self._doors is not None:
                await self._doors.open(pid, nonce_of(folder))
        except BaseException:
            await asyncio.shield(self._undo(folder, sandbox))
            raise
        return sandbox

    def _plan(self, folder: Path, plan: Plan) -> Planned:
        planned = plan_jail(self.settings, self.images, plan, folder, self.uid)
        (folder / "jail.json").write_bytes(msgspec.json.encode(planned.jail))
        return planned

    def _start(self, folder: Path, planned: Planned) -> tuple[int, int]:
        """Start the holder of a new sandbox; returns its process id, and where it says that it is ready.

        On the thread of the event loop: what asyncio starts has inheritable files for a moment, and a holder that got
        one would keep it open, so that the output of another process would not end before this sandbox does.
        """
        line = holder_line(planned.jail, self.tools, holder_script(), planned.keeping)
        try:
            return Holder(folder, self.shims.boot_id).spawn(line, f"{nonce_of(folder)}.", planned.lock)
        except OSError as error:
            raise SandboxError(f"the holder of a sandbox cannot be started: {error}") from error

    async def _undo(self, folder: Path, sandbox: BubblewrapSandbox | None) -> None:
        with suppress(SandboxError):
            await (sandbox or BubblewrapSandbox(self, folder, None)).destroy()

    async def open(self, ref: SandboxRef) -> BubblewrapSandbox:
        """A sandbox of this place, also one under another root. Raises SandboxError."""
        folder = self.folders.folder_of(ref)
        return BubblewrapSandbox(self, folder, await asyncio.to_thread(read_jail, folder))

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every sandbox under the root, half-made and half-removed ones too."""
        return self.folders.owned()

    async def renew_lease(self) -> None:
        """Touch the lease, and open doors to the gateway which a new relay does not know. Raises SandboxError."""
        self.folders.renew()
        if self._doors is not None and (holders := await asyncio.to_thread(self._holders)):
            await self._doors.renew(holders)

    async def close_door(self, folder: Path) -> None:
        """Close the way of a sandbox to the gateway."""
        if self._doors is not None:
            await self._doors.close(nonce_of(folder))

    def _holders(self) -> dict[str, int]:
        """The holders of all living sandboxes with a way to the gateway, by the names of their doors."""
        holders = {}
        for ref, _ in self.folders.owned():
            folder = Path(ref.handle)
            jail = read_jail(folder)
            if jail is None or jail.network != "gateway":
                continue
            if pid := Holder(folder, self.shims.boot_id).pid():
                holders[nonce_of(folder)] = pid
        return holders
