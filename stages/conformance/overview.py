"""What the backends say of themselves, in tables. Pure but for loading their classes."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from rollyard.schemas.errors import ConfigError
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import BACKENDS

HEADER: Final = ("backend", "isolates", "networks", "limits", "files", "also", "tried")


def overview() -> dict[str, Capabilities]:
    """Every backend that is known here and can be loaded, by name."""
    names = sorted({*BACKENDS.shipped, *entry_points(group=BACKENDS.group).names})
    found = {}
    for name in names:
        try:
            found[name] = BACKENDS.load(name).capabilities
        except ConfigError:
            found[name] = Capabilities(processes=False, networks=frozenset(), tested="cannot be loaded here")
    return found


def row(name: str, can: Capabilities) -> tuple[str, ...]:
    """One line of the table."""
    if not can.processes:
        return (name, "-", "-", "-", "none", "", can.tested)
    flags = ("builds", "users", "workdirs", "read_only", "set_network", "snapshots", "diff", "tty")
    strengths = {"hard": "", "best_effort": " (by looking)"}
    return (
        name,
        "yes" if can.isolated else "no",
        ", ".join(sorted(can.networks)),
        ", ".join(f"{field}{strengths[strength]}" for field, strength in can.limits) or "-",
        "images" if can.images else "one kind",
        ", ".join(flag for flag in flags if getattr(can, flag)),
        can.tested,
    )
