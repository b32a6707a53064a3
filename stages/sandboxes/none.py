"""Sandbox backend `none`: no sandbox at all, for agents that start no process."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import ANY_PLACE, DEFAULT_PLAN, ExecResult, Labels, Plan, ProcessEnd
from rollyard.stages.sandboxes.settings import BackendSettings


class NoneBackend:
    """Every worker reaches its sandboxes, since there are none."""

    name = "none"
    place = ANY_PLACE
    capabilities = Capabilities(processes=False)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """There are no settings. Raises ConfigError when one is given."""
        if unknown := settings.keys() - set(BackendSettings.__struct_fields__):
            raise ConfigError(f"sandbox backend none: unknown setting {min(unknown)!r}", hint="it takes none")
        return cls()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def reaches(self, place: str) -> bool:
        """Only the place `any`."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> NoneSandbox:
        """A reference that names the attempt."""
        return NoneSandbox(f"{labels.rollout_id}.{labels.attempt}")

    async def open(self, ref: SandboxRef) -> NoneSandbox:
        """The same again."""
        return NoneSandbox(ref.handle)

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Nothing is ever left behind."""
        return []

    async def renew_lease(self) -> None:
        """Nothing waits for it."""


class NoneSandbox:
    """Holds nothing and runs nothing; every method that would have to raises SandboxError."""

    home = ""
    workdir = ""
    gateway_url = None

    def __init__(self, handle: str) -> None:
        self.ref = SandboxRef(backend=NoneBackend.name, place=ANY_PLACE, handle=handle)

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Literal["work", "home"] = "work") -> None:
        """Raises SandboxError unless there are no files."""
        if files:
            _refuse(f"the file {next(iter(files))!r}")

    async def exec(
        self,
        script_or_argv: str | tuple[str, ...],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float,
        max_output_bytes: int = 65_536,
    ) -> ExecResult:
        """Raises SandboxError."""
        _refuse("a command")

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """Raises SandboxError."""
        _refuse(f"the process {name!r}")

    async def wait(self, name: str) -> ProcessEnd:
        """Raises SandboxError."""
        _refuse(f"the process {name!r}")

    async def output(self, name: str, max_bytes: int) -> tuple[bytes, bytes]:
        """Nothing was written."""
        return b"", b""

    async def read_file(self, path: str, max_bytes: int) -> bytes | None:
        """There is no file."""
        return None

    async def kill(self, name: str) -> None:
        """Nothing runs."""

    async def close_channels(self) -> None:
        """There are none."""

    async def destroy(self) -> None:
        """There is nothing to remove."""


def _refuse(what: str) -> NoReturn:
    raise SandboxError(f"the sandbox backend 'none' has no place for {what}", hint="use the backend 'local'")
