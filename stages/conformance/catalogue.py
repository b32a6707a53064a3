"""All behaviours, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollyard.schemas.errors import ConfigError
from rollyard.stages.conformance.behaviour import Behaviour
from rollyard.stages.conformance.execs import execs
from rollyard.stages.conformance.files import files
from rollyard.stages.conformance.labels import labels
from rollyard.stages.conformance.lifecycle import lifecycle
from rollyard.stages.conformance.limits import limits
from rollyard.stages.conformance.networks import networks
from rollyard.stages.conformance.processes import processes
from rollyard.stages.conformance.shells import shells

GROUPS: Final = (files, execs, processes, shells, limits, networks, labels, lifecycle)
BEHAVIOURS: Final[tuple[Behaviour, ...]] = tuple(known for group in GROUPS for known in group.behaviours)


def chosen(only: Sequence[str]) -> list[Behaviour]:
    """Those of the given groups or ids; all without any. Raises ConfigError for one that is not known."""
    names = {behaviour.id for behaviour in BEHAVIOURS} | {group.name for group in GROUPS}
    if unknown := [name for name in only if name not in names]:
        groups = ", ".join(group.name for group in GROUPS)
        raise ConfigError(f"there is no behaviour {unknown[0]!r}", hint=f"give a group ({groups}) or `group.name`")
    return [known for known in BEHAVIOURS if not only or known.id in only or known.group in only]
