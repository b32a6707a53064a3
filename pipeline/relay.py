"""A machine's relay as others see it: whether there must be one, whether there is one, and how to get one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from msgspec import structs

from rollyard.pipeline.config import ENV_PREFIX, Config, to_toml
from rollyard.pipeline.supervisor import Probe
from rollyard.schemas.errors import SetupError

log = structlog.get_logger(__name__)

WITHOUT: Final = frozenset({"local", "none", "e2b"})
"""Backends whose sandboxes reach a gateway by themselves."""
CONTROL_SOCKET: Final = "control.sock"
LOOK_S: Final = 2.0
READY_S: Final = 30.0
IDLE_LEASES: Final = 10.0
"""A relay that a worker started ends after so many leases in which nobody had a use for it; sandboxes without a worker
end before that."""

# The shell goes at once, so that the relay is nobody's child: it outlives whoever started it.
_DETACH: Final = 'log=$1; shift; "$@" >>"$log" 2>&1 </dev/null &'


def needs_relay(config: Config) -> bool:
    """Whether a sandbox backend of this configuration keeps sandboxes away from the network."""
    return bool(set(config.worker.backends) - WITHOUT)


def answers_relay(folder: Path) -> Probe:
    """A probe: a relay listens in its folder."""

    async def probe() -> bool:
        try:
            # By a short name of the folder: the kernel takes no long path of a socket.
            directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            _, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{CONTROL_SOCKET}")
        except OSError:
            return False
        finally:
            os.close(directory)
        writer.close()
        with suppress(OSError):
            # Not before the socket is closed: the loop may end right after this.
            await writer.wait_closed()
        return True

    return probe


@asynccontextmanager
async def relay_beside(config: Config) -> AsyncIterator[None]:
    """Within the block this machine has a relay, if a sandbox backend needs one: where none answers, one is started.

    It outlives the block. With [relay] start = false somebody else sees to it. Raises SetupError when it does not
    start.
    """
    if not needs_relay(config) or not config.relay.start:
        yield
        return
    probe = answers_relay(config.relay_dir())
    if not await probe():
        await _start(config, probe)
    keeper = asyncio.create_task(_keep(config, probe))
    try:
        yield
    finally:
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper


async def _keep(config: Config, probe: Probe) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        if not await probe():
            try:
                await _start(config, probe)
            except SetupError as error:
                log.error("relay_not_started", error=str(error))


async def _start(config: Config, probe: Probe) -> None:
    folder = config.relay_dir().absolute()
    written, output = folder / "config.toml", folder / "log"
    own = structs.replace(
        config,
        relay=structs.replace(config.relay, folder=str(folder)),
        store=structs.replace(config.store, data=str(config.data_dir().absolute())),
    )
    idle_s = f"{config.worker.lease_s * IDLE_LEASES:g}"
    command = (sys.executable, "-m", "rollyard", "relay", "--config", str(written), "--idle-s", idle_s)
    env = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(to_toml(own))
        await asyncio.to_thread(
            subprocess.run,
            ("sh", "-c", _DETACH, "relay", str(output), *command),
            check=True,
            cwd="/",
            env=env,
            start_new_session=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"the relay cannot be started: {error}", hint="set [relay] folder to a writable one"
        ) from error
    try:
        async with asyncio.timeout(READY_S):
            while not await probe():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise SetupError(f"the relay did not start within {READY_S:g} s", hint=f"see {output}") from None
    log.info("relay_started_beside", folder=str(folder))
