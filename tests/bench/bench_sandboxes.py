"""What sandboxes cost: making and destroying them, and 500 that sleep.

`make` compares, in rounds, create and destroy of the backends with the bare command that mounts, jails and runs `true`:
by the clock, and by the processor time of this process and of the children that it has waited for (of Docker that is
not the daemon's), which says more on a machine that others use.
`sleep` runs agents that sleep through the real pipeline, one worker process a role, and looks at memory meanwhile.

    python tests/bench/bench_sandboxes.py [--rounds 20] [--agents 500] [--only make|sleep] [--backends local,bubblewrap]
"""

# ruff: noqa: ASYNC221

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import uvloop
from measure import rss_mib, table
from msgspec import structs
from roles import Yard, yard

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "stages/sandboxes")]
from kit_settings import docker_image, docker_missing, jail_image, jail_missing  # noqa: E402

from rollyard.pipeline.codec import encode  # noqa: E402
from rollyard.pipeline.config import WorkerConfig  # noqa: E402
from rollyard.schemas import subjects  # noqa: E402
from rollyard.schemas.sandbox import SandboxSpec  # noqa: E402
from rollyard.schemas.task import AgentSpec, Task  # noqa: E402
from rollyard.stages.sandbox import Labels, Plan, SandboxBackend, open_backend  # noqa: E402
from rollyard.stages.sandboxes.jail_settings import DEFAULT_UID  # noqa: E402

NAP: Final = "5113"
"""Seconds that no other process sleeps."""
REAPED_S: Final = 0.02
"""After this the children of a sandbox that was destroyed have been waited for."""
_BARE: Final = """
mount -t tmpfs -o size=64m t /tmp && mkdir /tmp/u /tmp/w /tmp/m &&
mount -t overlay o -o lowerdir="$1",upperdir=/tmp/u,workdir=/tmp/w,userxattr /tmp/m &&
exec bwrap --bind /tmp/m / --dev /dev --proc /proc --unshare-user --unshare-pid --unshare-ipc --unshare-uts \
  --die-with-parent --new-session --cap-drop ALL --clearenv --setenv PATH /usr/bin:/bin --chdir / true
"""
Act = Callable[[], Awaitable[None]]


async def bare(tree: str) -> None:
    """unshare, a tmpfs, an overlay and a jail that runs `true`, without anything around them.

    A root worker's jails are another user's, who may have no way to the tree: it is shown at another place.
    """
    line = ["unshare", "-Urmn", "sh", "-c", _BARE, "sh", tree]
    if os.getuid() == 0:
        become = ["setpriv", f"--reuid={DEFAULT_UID}", f"--regid={DEFAULT_UID}", "--clear-groups"]
        show = 'mount --bind "$1" /mnt && shift && exec "$@"'
        line = ["unshare", "-m", "sh", "-c", show, "sh", tree, *become, *line[:-1], "/mnt"]
    subprocess.run(line, check=True, cwd="/")


@asynccontextmanager
async def made(name: str, image: str, folder: Path, **settings: Any) -> AsyncIterator[SandboxBackend]:
    """A backend whose lease is kept."""
    async with open_backend(name, {"root": str(folder / f"{name}{len(settings)}"), **settings}) as backend:
        renewing = asyncio.create_task(_renew(backend))
        try:
            yield backend
        finally:
            renewing.cancel()
            for ref, labels in await backend.list_owned():
                if labels.run == "bench":
                    await (await backend.open(ref)).destroy()


async def _renew(backend: SandboxBackend) -> None:
    while True:
        await backend.renew_lease()
        await asyncio.sleep(5)


def _labels() -> Labels:
    return Labels(run="bench", rollout_id="bench", attempt=1, owner="bench", created_ms=0, role="check")


async def cycle(backend: SandboxBackend, image: str, took: dict[str, list[float]], *, runs: bool = False) -> None:
    """Create, perhaps run `true`, and destroy; milliseconds of creation apart."""
    began, used_s = time.perf_counter(), processor_s()
    sandbox = await backend.create(_labels(), Plan(image=image, network="open" if not image else "none"))
    took.setdefault("create", []).append((time.perf_counter() - began) * 1000)
    if runs:
        assert (await sandbox.exec("true", timeout_s=60)).exit_code == 0
    await sandbox.destroy()
    took.setdefault("whole", []).append((time.perf_counter() - began) * 1000)
    await asyncio.sleep(REAPED_S)
    took.setdefault("processor", []).append((processor_s() - used_s) * 1000)


def processor_s() -> float:
    """Processor seconds of this process and its children that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


async def making(rounds: int) -> None:
    """Print what making costs."""
    took: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        async with AsyncExitStack() as stack:
            ways = await _ways(stack, Path(name))
            for _ in range(rounds):
                for way, act in ways.items():
                    if isinstance(act, str):
                        began, used_s = time.perf_counter(), processor_s()
                        await bare(act)
                        took.setdefault(way, {}).setdefault("whole", []).append((time.perf_counter() - began) * 1000)
                        took[way].setdefault("processor", []).append((processor_s() - used_s) * 1000)
                        continue
                    backend, image, runs = act
                    await cycle(backend, image, took.setdefault(way, {}), runs=runs)
                    if "warm" in way:
                        await asyncio.sleep(3)  # the pool fills while an agent works
    rows = [
        [way, *(f"{statistics.median(of[part]):.3g} ({min(of[part]):.3g})" if part in of else "" for part in _PARTS)]
        for way, of in took.items()
    ]
    print(table(["ms: median (least)", "create", "create to destroyed", "processor time of that"], rows))


_PARTS: Final = ("create", "whole", "processor")


async def _ways(stack: AsyncExitStack, folder: Path) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    if not jail_missing():
        tree = jail_image()
        jails = await stack.enter_async_context(made("bubblewrap", tree, folder))
        ways["bare unshare + tmpfs + overlay + bwrap true"] = tree
        ways["bubblewrap"] = (jails, tree, False)
        ways["bubblewrap, with exec true"] = (jails, tree, True)
    local = await stack.enter_async_context(made("local", "", folder))
    ways["local"] = (local, "", False)
    if not docker_missing():
        image = docker_image()
        ways["docker"] = (await stack.enter_async_context(made("docker", image, folder)), image, False)
        pool = await stack.enter_async_context(made("docker", image, folder, warm=2))
        ways["docker, warm pool"] = (pool, image, False)
    return ways


# --- agents that sleep ---


def _of_agents(root: Path) -> list[int]:
    """Processes that belong to sandboxes under `root`: shims, holders, jails, agents."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes()
            if str(root).encode() in line or f"sleep\0{NAP}".encode() in line:
                found.append(int(folder.name))
    return found


def _pss_kib(pids: Iterable[int]) -> float:
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _agents() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += (folder / "cmdline").read_bytes() == f"sleep\0{NAP}\0".encode()
    return count


async def sleeping(backend: str, image: str, agents: int) -> list[object]:
    """One line of the table."""
    config = structs.replace(WorkerConfig(), backends=(backend,), max_ready=64)
    with tempfile.TemporaryDirectory() as name:
        async with yard(Path(name), worker=config) as running:
            await running.start_workers(slots=agents)
            await running.start("controller", "controller")
            await asyncio.sleep(3)
            pid = running.children["run"].pid
            before = rss_mib(pid)
            await _submit(running, backend, image, agents)
            began = time.monotonic()
            while (there := _agents()) < agents and time.monotonic() - began < 420:  # noqa: ASYNC110
                await asyncio.sleep(2)
            started_s = time.monotonic() - began
            await asyncio.sleep(20)  # heartbeats are due every six seconds
            pids = _of_agents(running.config.sandboxes_dir())
            again = await _redelivered(running)
            row = [backend, there, started_s, (rss_mib(pid) - before) * 1024 / there]
            row += [_pss_kib(pids) / 1024 / there, len(pids) / there, again]
            for agent in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(agent, 9)
            return row


async def _submit(running: Yard, backend: str, image: str, agents: int) -> None:
    for number in range(agents):
        task = Task(
            id=f"t{number}",
            prompt="sleep",
            agent=AgentSpec(harness="command", args={"command": ["sleep", NAP]}),
            sandbox=SandboxSpec(backend=backend, image=image, network="default"),
        )
        await running.bus.publish(subjects.task_subject("sleep"), encode(task))


async def _redelivered(running: Yard) -> int:
    """Messages of RUN that were given out again, as after a missed heartbeat."""
    again = 0
    names = (await running.bus.api(f"CONSUMER.NAMES.{subjects.STAGES}", {})).get("consumers") or []
    for name in names:
        if name.startswith("run-"):
            again += (await running.bus.api(f"CONSUMER.INFO.{subjects.STAGES}.{name}"))["num_redelivered"]
    return int(again)


async def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--only", choices=("make", "sleep"))
    parser.add_argument("--backends", default="local,bubblewrap")
    arguments = parser.parse_args()
    print("load", *os.getloadavg())
    if arguments.only != "sleep":
        await making(arguments.rounds)
    if arguments.only != "make":
        rows = []
        for backend in arguments.backends.split(","):
            image = jail_image() if backend == "bubblewrap" else ""
            rows.append(await sleeping(backend, image, arguments.agents))
        head = [
            "backend",
            "agents",
            "s until all sleep",
            "KiB in the RUN worker each",
            "MiB PSS of all its processes each",
        ]
        print(table([*head, "processes each", "given out again"], rows))
    print("load", *os.getloadavg())


if __name__ == "__main__":
    uvloop.run(main())
