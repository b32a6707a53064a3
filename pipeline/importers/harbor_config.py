"""The file task.toml of a task in Harbor's format: its fields, and which of them have no place in a Rollyard task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

NetworkMode = Literal["public", "no-network", "allowlist"]
User = str | int | None
MIB: Final = 1 << 20

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?\Z", re.IGNORECASE)
_UNIT_BYTES: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Package(Struct, frozen=True):
    """[task]"""

    name: str = ""
    version: str | None = None
    description: str = ""
    keywords: tuple[str, ...] = ()


class AgentTable(Struct, frozen=True):
    """[agent]"""

    timeout_sec: float | None = None
    user: User = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None


class Artifact(Struct, frozen=True):
    """One of `artifacts`."""

    source: str
    service: str | None = None


class VerifierTable(Struct, frozen=True):
    """[verifier]"""

    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None


class Healthcheck(Struct, frozen=True):
    """[environment.healthcheck]"""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    retries: int = 3


class EnvironmentTable(Struct, frozen=True):
    """[environment]"""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    healthcheck: Healthcheck | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    allow_internet: bool | None = None

    def memory_bytes(self) -> int | None:
        """Of memory_mb, else of the older `memory`, if that is a size."""
        return self.memory_mb * MIB if self.memory_mb is not None else _bytes(self.memory)

    def storage_bytes(self) -> int | None:
        """Of storage_mb, else of the older `storage`, if that is a size."""
        return self.storage_mb * MIB if self.storage_mb is not None else _bytes(self.storage)


class SolutionTable(Struct, frozen=True):
    """[solution]"""

    env: dict[str, str] = {}


class HarborConfig(Struct, frozen=True):
    """The whole file, less what is refused."""

    task: Package = Package()
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    artifacts: tuple[str | Artifact, ...] = field(default_factory=tuple)


_REFUSED: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "steps": (bool, "a task has one prompt; import each step as a task of its own"),
    "environment.gpus": (bool, "no backend gives GPUs"),
    "environment.gpu_types": (bool, "no backend gives GPUs"),
    "environment.tpu": (bool, "no backend gives TPUs"),
    "environment.mcp_servers": (bool, "no server can be started beside the agent"),
    "environment.skills_dir": (bool, "agents get no skills"),
    "environment.os": (lambda value: str(value).lower() != "linux", "sandboxes are Linux"),
    "verifier.environment": (bool, "the verifier gets a sandbox of the same image"),
    "verifier.collect": (bool, "nothing is run between agent and verifier"),
}
"""Fields that cannot be represented: when they are set so, and why."""


def read_config(raw: Mapping[str, Any]) -> tuple[HarborConfig | None, dict[str, str]]:
    """The fields, and what is refused or wrong by the field's name. None when a value is of a wrong type."""
    refused = {
        name: why for name, (is_set, why) in _REFUSED.items() if (value := _at(raw, name)) is not None and is_set(value)
    }
    try:
        config = msgspec.convert(dict(raw), HarborConfig)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        return None, refused | {where.rstrip("`") or "task.toml": what}
    wrong: dict[str, str] = {}
    for name, text in (("memory", config.environment.memory), ("storage", config.environment.storage)):
        if text is not None and _bytes(text) is None:
            wrong[f"environment.{name}"] = f"{text!r} is no size such as 512M or 2G"
    for name, env in (
        ("environment.env", config.environment.env),
        ("verifier.env", config.verifier.env),
        ("solution.env", config.solution.env),
    ):
        if secret := next((key for key, value in env.items() if "${" in value), None):
            wrong[f"{name}.{secret}"] = "takes its value from the machine of whoever runs it; write the value itself"
    return config, refused | wrong


def network_of(config: HarborConfig) -> tuple[NetworkMode | None, tuple[str, ...]]:
    """Network mode and allowed hosts while the agent works; no mode: the file says nothing."""
    if config.agent.network_mode is not None:
        return config.agent.network_mode, config.agent.allowed_hosts or ()
    own = config.environment
    if own.network_mode is None and own.allow_internet is not None:
        return "public" if own.allow_internet else "no-network", ()
    return own.network_mode, own.allowed_hosts or ()


def _at(raw: Mapping[str, Any], name: str) -> Any:
    value: Any = raw
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _bytes(text: str | None) -> int | None:
    match = None if text is None else _SIZE.match(text.strip())
    return None if match is None else int(float(match[1]) * _UNIT_BYTES[match[2].upper()])
