"""What the conformance kit opens each backend with on this machine, for its tests and its record."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import images
from e2b_server.running import KEY, KEY_ENV, RunningServer
from e2b_server.running import missing as e2b_missing

from rollyard.schemas.errors import SandboxError
from rollyard.stages.conformance.bench import Setting
from rollyard.stages.conformance.counterparts import counterparts
from rollyard.stages.sandboxes import jail_setup
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID

BACKENDS = ("local", "bubblewrap", "docker", "e2b")
DOCKER_IMAGE = "rollyard-tests/tree:1"
_ONE_USER = "without root, the sandboxes of the tests' server have one user"
NOT_HERE = {"e2b": dict.fromkeys(("exec.user", "shell.user", "lifecycle.user"), _ONE_USER) if os.getuid() else {}}
"""Behaviours that the counterpart of the tests cannot show, and why."""


class Missing(Exception):
    """This machine lacks what the backend needs; the text says what."""


def docker_missing() -> str:
    """Why there is no Docker engine here; empty when there is one."""
    if not shutil.which("docker"):
        return "there is no docker program"
    answer = subprocess.run(["docker", "version"], capture_output=True, check=False)
    return "" if answer.returncode == 0 else "no Docker engine answers"


def docker_image() -> str:
    """The image of the tests in Docker, made if need be."""
    known = subprocess.run(["docker", "image", "inspect", DOCKER_IMAGE], capture_output=True, check=False)
    if known.returncode != 0:
        subprocess.run(["docker", "import", str(images.root_tar()), DOCKER_IMAGE], capture_output=True, check=True)
    return DOCKER_IMAGE


def jail_image() -> str:
    """The root tree of the tests, of the user that jails of this process run as."""
    return str(images.root_tree(DEFAULT_UID if os.getuid() == 0 else None))


def jail_missing() -> str:
    """Why there can be no jails here; empty when there can."""
    try:
        jail_setup.find_tools()
    except SandboxError as error:
        return str(error)
    return images.missing()


@asynccontextmanager
async def setting_of(backend: str, folder: Path) -> AsyncIterator[Setting]:
    """Start what it needs. Raises Missing."""
    async with AsyncExitStack() as stack:
        server = None
        if backend == "e2b":
            _need(e2b_missing())
            os.environ[KEY_ENV] = KEY
            server = await stack.enter_async_context(RunningServer.started())
        image, settings = _given(backend) if server is None else ("", server.settings(folder))
        setting = await stack.enter_async_context(counterparts(backend, image, settings))
        yield setting if server is None else await server.reach(setting)


def _given(backend: str) -> tuple[str, dict[str, Any]]:
    """Image and settings."""
    match backend:
        case "bubblewrap":
            _need(jail_missing())
            return jail_image(), {"watch_s": 0.2}
        case "docker":
            _need(docker_missing() or images.missing())
            return docker_image(), {}
    return "", {}


def _need(lack: str) -> None:
    if lack:
        raise Missing(lack)
