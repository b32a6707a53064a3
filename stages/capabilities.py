"""What a sandbox backend can do, and what a task asks of it that it cannot. Admit asks before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rollyard.schemas.sandbox import Limits, NetworkMode, SandboxSpec

Strength = Literal["hard", "best_effort"]
"""`hard`: the kernel keeps the limit; `best_effort`: somebody looks every second, and ends what is over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One backend's. Whatever is left out it cannot do."""

    isolated: bool = False  # an agent reaches neither the worker's files nor its processes
    processes: bool = True  # False: it has no place for files and processes at all
    images: bool = False
    builds: bool = False
    users: bool = False
    workdirs: bool = False  # a working directory of the task's choice
    read_only: bool = False
    networks: frozenset[NetworkMode] = frozenset({"open"})
    set_network: bool = False
    limits: tuple[tuple[str, Strength], ...] = ()  # names of fields of Limits
    snapshots: bool = False
    diff: bool = False
    tty: bool = False
    keeps_ends: bool = False  # an agent cannot reach the process that keeps its end, and so not lose it on purpose
    mounts: Literal["same", "bind", "copy"] = "same"
    """How folders of the worker's machine get inside: seen at the same path, bound at another, or copied."""
    tested: str = "in CI"
    """How far the backend was tried; users see it in `rollyard sandbox ls`."""

    def network(self, asked: NetworkMode) -> NetworkMode:
        """What `default` means here."""
        if asked != "default":
            return asked
        return "gateway" if "gateway" in self.networks else "open"


def refusals(name: str, capabilities: Capabilities, spec: SandboxSpec) -> list[str]:
    """Texts `field: what the backend lacks; what to do`; none when it can do what the task asks."""
    asked: Final[dict[str, tuple[bool, bool, str]]] = {
        "image": (bool(spec.image), capabilities.images, "has no images"),
        "build": (spec.build is not None, capabilities.builds, "builds no images"),
        "user": (bool(spec.user), capabilities.users, "has one user only"),
        "workdir": (bool(spec.workdir), capabilities.workdirs, "has a working directory of its own"),
        "read_only": (spec.read_only, capabilities.read_only, "cannot make its files read-only"),
    }
    problems = [
        f"sandbox.{field}: the backend {name!r} {lack}; leave it out or choose another backend"
        for field, (wanted, can, lack) in asked.items()
        if wanted and not can
    ]
    if spec.image and spec.build is not None:
        problems.append("sandbox.build: there is an image as well; keep one of the two")
    if not capabilities.users:
        problems += [
            f"sandbox.setup[{number}].user: the backend {name!r} has one user only; leave it out"
            for number, step in enumerate(spec.steps())
            if step.user
        ]
    return [*problems, *_network(name, capabilities, spec), *_limits(name, capabilities, spec.limits)]


def _network(name: str, capabilities: Capabilities, spec: SandboxSpec) -> list[str]:
    if spec.allow_hosts and spec.network != "allow":
        return [f"sandbox.allow_hosts: the network is {spec.network!r}; set sandbox.network to 'allow'"]
    if spec.network in ("default", *capabilities.networks):
        return []
    known = ", ".join(sorted(capabilities.networks))
    return [f"sandbox.network: the backend {name!r} cannot keep to {spec.network!r}; it can do {known}"]


def _limits(name: str, capabilities: Capabilities, limits: Limits) -> list[str]:
    can = dict(capabilities.limits)
    known = ", ".join(sorted(can)) or "none"
    return [
        f"sandbox.limits.{field}: the backend {name!r} cannot keep it; its limits are {known}"
        for field in limits.__struct_fields__
        if getattr(limits, field) is not None and field not in can
    ]
