"""Peers from PyPI, each in an environment of its own under ~/.cache/rollyard/bench, with the version pinned here.

None of their code is part of this repository; what is not installed is left out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from peers.peer import CHAT, Door, Peer, PlainPeer, World
from peers.process import started

from rollyard.pipeline.embedded import free_port

CACHE: Final = Path.home() / ".cache" / "rollyard" / "bench"
KEY: Final = "sk-bench"


@dataclass(frozen=True)
class Package:
    """What is installed for a peer, and with which of the Pythons that are on the path."""

    name: str
    requirement: str
    pythons: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of pip, for the requirement."""
    further: tuple[str, ...] = ()
    """What is installed after it."""

    @property
    def folder(self) -> Path:
        return CACHE / self.requirement.replace("[proxy]", "")

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def is_installed(self) -> bool:
        # The mark is written last: an installation that was cut short has none.
        return (self.folder / "installed").exists()

    def install(self) -> None:
        """Raises RuntimeError without a fitting Python, CalledProcessError when pip fails."""
        python = next((found for name in self.pythons if (found := _python(name))), None)
        if python is None:
            raise RuntimeError(f"{self.name} needs one of {', '.join(self.pythons)} on the path")
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", self.folder], check=True)
        pip = [self.bin / "python", "-m", "pip", "install", "-qq"]
        subprocess.run([*pip, *self.options, self.requirement], check=True)
        if self.further:
            subprocess.run([*pip, *self.further], check=True)
        (self.folder / "installed").touch()


PACKAGES: Final = {
    package.name: package
    for package in (
        Package("litellm", "litellm[proxy]==1.108.7", ("python3.11", "python3.12", "python3.13")),
        Package("agentlightning", "agentlightning==1.0.2", ("python3.12", "python3.13")),
        Package("mitmproxy", "mitmproxy==12.3.1", ("python3.12", "python3.13")),
    )
}


def _python(name: str) -> str | None:
    """A Python that runs: version managers put names on the path that do not."""
    found = shutil.which(name)
    if found and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode:
        return None
    return found


@asynccontextmanager
async def litellm(world: World) -> AsyncIterator[PlainPeer]:
    """LiteLLM's proxy with a master key and without a database. It keeps nothing."""
    port, package = free_port(), PACKAGES["litellm"]
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"hosted_vllm/{name}", "api_base": f"{world.stub_url}/v1", "api_key": "none"},
        }
        for name in ("exact", "plain", "paced")
    ]
    config = world.folder / "litellm.json"
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    command = [str(package.bin / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DISABLE_ADMIN_UI": "True"}
    async with started([*command, "--num_workers", "1"], world.folder / "litellm.log", port, env=env) as pid:
        yield PlainPeer("litellm", port, [pid], key=KEY, slow=True)


@asynccontextmanager
async def mitmproxy(world: World) -> AsyncIterator[PlainPeer]:
    """mitmproxy as a reverse proxy that holds each message whole, as an addon that captures needs it."""
    port, package = free_port(), PACKAGES["mitmproxy"]
    command = [str(package.bin / "mitmdump"), "-q", "--mode", f"reverse:{world.stub_url}"]
    command += ["--listen-host", "127.0.0.1", "--listen-port", str(port), "--set", f"confdir={world.folder}/mitm"]
    async with started(command, world.folder / "mitmproxy.log", port) as pid:
        yield PlainPeer("mitmproxy", port, [pid], captures=False, slow=True)


@dataclass
class AgentLightning:
    """See Peer. Its API server: it refuses streams and keeps all calls in memory."""

    port: int
    pids: list[int]
    name: str = "agentlightning"
    captures: bool = True
    streams: bool = False
    plain: bool = False
    continues: bool = False
    slow: bool = True

    async def door(self, client: int, model: str) -> Door:
        """See Peer."""
        rollout = uuid4().hex
        await asyncio.to_thread(self.post, "/api/rollouts", [{"input": {}, "rollout_id": rollout}])
        path = f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai{CHAT}"
        return Door(self.port, path, {"Authorization": f"Bearer {KEY}"})

    async def leave(self) -> None:
        """See Peer."""

    def post(self, path: str, body: Any) -> None:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            answer.read()


@asynccontextmanager
async def agentlightning(world: World) -> AsyncIterator[AgentLightning]:
    """agentlightning's server, with the stub as its only model server."""
    port, package = free_port(), PACKAGES["agentlightning"]
    command = [str(package.bin / "agl-server"), "host=127.0.0.1", f"port={port}", f"key={KEY}"]
    command += ["default_proxy.model_name=exact", f"hydra.run.dir={world.folder}/agl", "hydra.output_subdir=null"]
    async with started(command, world.folder / "agentlightning.log", port) as pid:
        peer = AgentLightning(port, [pid])
        await asyncio.to_thread(peer.post, "/api/models", [{"model": "exact", "endpoint": f"{world.stub_url}/v1"}])
        yield peer


START: Final[dict[str, Callable[[World], AbstractAsyncContextManager[Peer]]]] = {
    "litellm": litellm,
    "agentlightning": agentlightning,
    "mitmproxy": mitmproxy,
}
