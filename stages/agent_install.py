"""Getting agents into sandboxes: bundles are bound, seen at their own path, or copied, as the backend can."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rollyard.harnesses.bundles.bundle import MARKER, PYTHON, find_bundle
from rollyard.harnesses.harness import Needs
from rollyard.schemas.errors import HarnessError
from rollyard.schemas.task import AgentSpec
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.checked_harness import open_checked
from rollyard.stages.sandbox import Mount, Sandbox

INSIDE: Final = "/opt/rollyard"
"""Bundles lie below it, by name, where they do not lie at their own path."""
COPY_TIMEOUT_S: Final = 300.0


def agent_mounts(agent: AgentSpec, capabilities: Capabilities) -> tuple[Mount, ...]:
    """What `Plan.mounts` must hold for this agent: its bundles, where the backend binds folders.

    Raises HarnessError for a bundle that is not there, on every kind of backend.
    """
    found = [(name, find_bundle(name)) for name in _bundles(agent, capabilities)]
    if capabilities.mounts != "bind":
        return ()
    return tuple(Mount(folder, f"{INSIDE}/{name}") for name, folder in found)


async def install_agent(sandbox: Sandbox, agent: AgentSpec, capabilities: Capabilities) -> None:
    """Copy the agent's bundles into a new sandbox, where the backend can only copy, unless its image holds them.

    Raises SandboxError, HarnessError.
    """
    if capabilities.mounts != "copy":
        return
    for name in _bundles(agent, capabilities):
        folder, target = find_bundle(name), f"{INSIDE}/{name}"
        marker = (folder / MARKER).read_bytes()
        if await sandbox.read_file(f"{target}/{MARKER}", len(marker) + 1) == marker:
            continue
        user = "root" if capabilities.users else None
        script = f"mkdir -p {target} && chmod 0777 {target}"
        made = await sandbox.exec(script, user=user, timeout_s=COPY_TIMEOUT_S)
        if made.exit_code != 0:
            tail = made.stderr[-500:].decode(errors="replace").strip()
            raise HarnessError(
                f"the agent bundle {name} cannot be copied into the sandbox: {tail}",
                hint=f"put the bundle's folder at {target} in the image or template",
            )
        await sandbox.put_tree(await asyncio.to_thread(packed, folder), target)


def bundle_folder(agent: AgentSpec, capabilities: Capabilities) -> str:
    """Where the agent's own bundle is, as seen inside; empty: it has none. Raises HarnessError."""
    name = _needs(agent).bundle
    return folder_inside(name, capabilities) if name else ""


def python_program(agent: AgentSpec, capabilities: Capabilities) -> str:
    """The interpreter for agents that are a script, as seen inside. Raises HarnessError."""
    if capabilities.mounts == "same":
        return sys.executable
    return f"{folder_inside(PYTHON, capabilities)}/bin/python3" if _needs(agent).python else "python3"


def folder_inside(name: str, capabilities: Capabilities) -> str:
    """Where a bundle is, as seen inside. Raises HarnessError for one that is not there."""
    return str(find_bundle(name)) if capabilities.mounts == "same" else f"{INSIDE}/{name}"


def packed(folder: Path) -> bytes:
    """A bundle as a tar archive. The marker comes last, so that a copy which was cut short has none."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
            tar.add(path, path.name)
    return archive.getvalue()


def _needs(agent: AgentSpec) -> Needs:
    return open_checked(agent.harness).needs(agent.args)


def _bundles(agent: AgentSpec, capabilities: Capabilities) -> Iterable[str]:
    needs = _needs(agent)
    if needs.bundle:
        yield needs.bundle
    # At its own path the worker's interpreter can be seen as well.
    if needs.python and capabilities.mounts != "same":
        yield PYTHON
