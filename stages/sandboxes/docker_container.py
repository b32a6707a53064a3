"""What the engine is asked for when a container is made. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from rollyard.schemas.sandbox import Limits, NetworkMode
from rollyard.stages.sandbox import Plan
from rollyard.stages.sandboxes.docker_labels import Facts
from rollyard.stages.sandboxes.docker_settings import DockerSettings
from rollyard.stages.sandboxes.door import shared_folder
from rollyard.stages.sandboxes.inside import Inside

TOP: Final = "/rollyard"
HOME: Final = TOP + "/home"
WORKDIR: Final = TOP + "/work"
RELAY: Final = TOP + "-relay"
"""Where the relay's folder is seen inside."""
MADE: Final = frozenset({TOP, HOME, WORKDIR, RELAY, "/tmp"})
"""What every sandbox has that its image may not have."""
NETWORKS: Final[dict[NetworkMode, str]] = {"gateway": "none", "none": "none", "open": "bridge"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What an image says about itself."""

    identity: str
    user: str = ""
    workdir: str = ""

    @classmethod
    def of(cls, inspected: Mapping[str, Any]) -> Image:
        """Read what the engine tells."""
        config = inspected.get("Config") or {}
        return cls(identity=str(inspected["Id"]), user=config.get("User") or "", workdir=config.get("WorkingDir") or "")


def filled(plan: Plan, image: Image, settings: DockerSettings) -> Plan:
    """The plan with the image's and the backend's defaults in place of what it leaves open, but for its deadline."""
    limits = _limits(plan.limits, settings)
    workdir = posixpath.normpath(plan.workdir or ("" if image.workdir == "/" else image.workdir) or WORKDIR)
    return replace(
        plan, image=image.identity, workdir=workdir, user=plan.user or settings.user or image.user, limits=limits
    )


def _limits(limits: Limits, settings: DockerSettings) -> Limits:
    defaults = {
        "cpus": settings.cpus or None,
        "memory_bytes": settings.memory_bytes or None,
        "max_processes": settings.max_processes,
        "max_file_bytes": settings.max_file_bytes,
    }
    unset = {name: value for name, value in defaults.items() if getattr(limits, name) is None}
    return msgspec.structs.replace(limits, **unset)


def facts(plan: Plan, nonce: str, settings: DockerSettings) -> Facts:
    """What whoever opens it must know, of a filled plan."""
    return Facts(
        nonce=nonce,
        workdir=plan.workdir,
        user=plan.user,
        gateway=bool(settings.relay) and plan.network != "none",
        read_only=plan.read_only,
        max_file_bytes=plan.limits.max_file_bytes or settings.max_file_bytes,
    )


def control(facts: Facts) -> str:
    """Where inside.sh keeps its files; another one in what is made of this sandbox's snapshot."""
    return f"{TOP}/control-{facts.nonce}"


def keeper(inside: Inside) -> Inside:
    """The same sandbox for what Rollyard itself runs in it: as root, whom no agent with another user can kill."""
    return replace(inside, user="0:0")


def folders(facts: Facts) -> tuple[str, ...]:
    """Folders that the container's first process makes, if the image has none, for every user to write to."""
    own = () if facts.workdir == WORKDIR else (facts.workdir,)
    return (TOP, control(facts), "/tmp", *own)


def host_config(plan: Plan, facts: Facts, settings: DockerSettings) -> dict[str, Any]:
    """The engine's HostConfig for a filled plan."""
    limits = plan.limits
    mounts = [
        {"Type": "bind", "Source": str(mount.source), "Target": mount.target, "ReadOnly": True} for mount in plan.mounts
    ]
    if facts.gateway:
        mounts.append(
            {"Type": "bind", "Source": str(shared_folder(Path(settings.relay))), "Target": RELAY, "ReadOnly": True}
        )
    config: dict[str, Any] = {
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "CapAdd": list(settings.cap_add),
        "SecurityOpt": ["no-new-privileges"],
        "NetworkMode": NETWORKS[plan.network],
        "PidsLimit": limits.max_processes,
        "LogConfig": {"Type": "none"},
        "IpcMode": "private",
        "RestartPolicy": {"Name": "no"},
    }
    if limits.memory_bytes:
        config |= {"Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes}
    if limits.cpus:
        config["NanoCpus"] = round(limits.cpus * 1_000_000_000)
    if settings.runtime:
        config["Runtime"] = settings.runtime
    if plan.read_only:
        room = limits.disk_bytes or settings.tmpfs_bytes
        options = f"rw,exec,nosuid,nodev,mode=1777,size={room}"
        config |= {"ReadonlyRootfs": True, "Tmpfs": dict.fromkeys((TOP, "/tmp", "/var/tmp"), options)}
        if facts.workdir != WORKDIR:
            # A volume, since that begins as what the image has there.
            mounts.append({"Type": "volume", "Target": facts.workdir})
    elif limits.disk_bytes:
        config["StorageOpt"] = {"size": str(limits.disk_bytes)}
    if mounts:
        config["Mounts"] = mounts
    return config | settings.extra
