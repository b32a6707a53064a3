"""What one command costs an agent loop that stands outside: the shell channel of each backend beside other ways.

All in one run, in rounds in which each takes its turn; commands: `true`, `ls -la /etc`, and 1 MB of output.

    python tests/bench/bench_shell.py [--rounds 7] [--install]
"""

# ruff: noqa: ASYNC220, ASYNC221

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import uvloop
from measure import table
from peers.installed import Package
from peers.shell_tmux import tmux

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "stages/sandboxes")]
from kit_settings import docker_image, docker_missing, jail_image, jail_missing  # noqa: E402

from rollyard.stages.sandbox import Labels, Plan, SandboxBackend, open_backend  # noqa: E402

COMMANDS: Final = {"true": "true", "ls -la": "ls -la /etc", "1 MB": "seq 150000"}
MIB_BYTES: Final = 938_895
"""Of `seq 150000`."""
TIMES: Final = {"true": 60, "ls -la": 20, "1 MB": 5}
SLOW_TIMES: Final = {"true": 6, "ls -la": 6, "1 MB": 2}
SLOW: Final = ("SWE-ReX session", "docker exec, CLI", "docker exec, SDK", "tmux")
SWEREX: Final = Package("swe-rex", "swe-rex==1.4.0", ("python3.11", "python3.12"))
Run = Callable[[str], Awaitable[int]]
"""Runs a command and gives the size of its output."""


async def floor_spawn(command: str) -> int:
    """fork, exec and wait of one program, without a shell: the floor of everything that starts a process."""
    arguments = {"true": ["true"], "ls -la /etc": ["ls", "-la", "/etc"], "seq 150000": ["seq", "150000"]}[command]
    return len(subprocess.run(arguments, stdout=subprocess.PIPE, check=True).stdout)


async def bash_c(command: str) -> int:
    """`bash -c`, a process a command."""
    return len(subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, check=True).stdout)


@asynccontextmanager
async def pipe_floor() -> AsyncIterator[Run]:
    """A byte through `cat` and back, by blocking calls."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin
    assert child.stdout
    to, back = child.stdin.fileno(), child.stdout.fileno()

    async def run(_: str) -> int:
        os.write(to, b"x")
        return len(os.read(back, 1))

    yield run
    child.stdin.close()
    child.wait()


@asynccontextmanager
async def rollyard(backend: str, image: str, folder: Path, **asked: Any) -> AsyncIterator[Run]:
    """The shell of a sandbox."""
    labels = Labels(run="bench", rollout_id="bench", attempt=1, owner="bench", created_ms=0, role="check")
    async with open_backend(backend, {"root": str(folder / backend)}) as opened:
        plan = Plan(image=image, network="open" if backend == "local" else "none")
        sandbox = await opened.create(labels, plan)
        renewing = asyncio.create_task(renew(opened))
        try:
            async with await sandbox.shell(**asked) as shell:

                async def run(command: str) -> int:
                    result = await shell.run(command, timeout_s=60, max_output_bytes=2 << 20)
                    assert result.exit_code == 0
                    return len(result.output)

                yield run
        finally:
            renewing.cancel()
            await sandbox.destroy()


async def renew(backend: SandboxBackend) -> None:
    """Keep its sandboxes alive."""
    while True:
        await backend.renew_lease()
        await asyncio.sleep(5)


@asynccontextmanager
async def docker_exec(image: str, *, sdk: bool) -> AsyncIterator[Run]:
    """A container, and one `docker exec` a command."""
    import docker  # noqa: PLC0415

    client = docker.from_env()
    container = client.containers.run(image, ["sleep", "100000"], detach=True, network_mode="none", init=True)

    async def by_sdk(command: str) -> int:
        code, output = container.exec_run(["bash", "-c", command])
        assert code == 0
        return len(output)

    async def by_cli(command: str) -> int:
        argv = ["docker", "exec", container.id, "bash", "-c", command]
        return len(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)

    try:
        yield by_sdk if sdk else by_cli
    finally:
        container.remove(force=True)
        client.close()


@asynccontextmanager
async def in_tmux() -> AsyncIterator[Run]:
    """tmux, captured as fast as it can be."""
    with tmux() as server:

        async def run(command: str) -> int:
            return len(server.run(command))

        yield run


async def timed(run: Run, command: str, times: int) -> list[float]:
    """Milliseconds of each."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        size = await run(command)
        took.append((time.perf_counter() - began) * 1000)
        if command == COMMANDS["1 MB"] and size not in (1, MIB_BYTES):
            assert size > MIB_BYTES, f"only {size} bytes came back"
    return took


def swerex(how: str, command: str, times: int) -> list[float]:
    """Milliseconds that SWE-ReX measures of itself, in its own environment."""
    script = Path(__file__).with_name("peers") / "shell_swerex.py"
    argv = [str(SWEREX.bin / "python"), str(script), how, str(times), command]
    told = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=300).stdout
    took: list[float] = json.loads(told)["took_ms"]
    return took


async def opened(stack: AsyncExitStack, folder: Path) -> dict[str, Run]:
    """Every way that there is on this machine, by name."""
    runs: dict[str, Run] = {"fork + exec (floor)": floor_spawn, "bash -c": bash_c}
    runs["pipe round trip (floor)"] = await stack.enter_async_context(pipe_floor())
    runs["Rollyard, local"] = await stack.enter_async_context(rollyard("local", "", folder))
    runs["Rollyard, local, terminal"] = await stack.enter_async_context(rollyard("local", "", folder, tty=True))
    if not jail_missing():
        runs["Rollyard, bubblewrap"] = await stack.enter_async_context(rollyard("bubblewrap", jail_image(), folder))
    if not docker_missing():
        image = docker_image()
        runs["Rollyard, docker"] = await stack.enter_async_context(rollyard("docker", image, folder))
        runs["docker exec, SDK"] = await stack.enter_async_context(docker_exec(image, sdk=True))
        runs["docker exec, CLI"] = await stack.enter_async_context(docker_exec(image, sdk=False))
    if shutil.which("tmux"):
        runs["tmux"] = await stack.enter_async_context(in_tmux())
    return runs


async def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by way and command."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        async with AsyncExitStack() as stack:
            runs = await opened(stack, Path(name))
            for _ in range(rounds):
                for what, command in COMMANDS.items():
                    for way, run in runs.items():
                        times = (SLOW_TIMES if way in SLOW else TIMES)[what]
                        found.setdefault(way, {}).setdefault(what, []).extend(await timed(run, command, times))
                    if SWEREX.is_installed():
                        for how in ("session", "execute"):
                            times = (SLOW_TIMES if how == "session" else TIMES)[what]
                            took = await asyncio.to_thread(swerex, how, command, times)
                            found.setdefault(f"SWE-ReX {how}", {}).setdefault(what, []).extend(took)
    return found


def report(found: dict[str, dict[str, list[float]]]) -> None:
    """Print medians and minima, and the ratios that are goals."""
    head = ["ms a command: median (least)", *COMMANDS]
    rows = [
        [way, *(f"{statistics.median(took[what]):.3g} ({min(took[what]):.3g})" for what in COMMANDS)]
        for way, took in found.items()
    ]
    print(table(head, rows))
    median = {way: {what: statistics.median(took) for what, took in of.items()} for way, of in found.items()}
    ours = [way for way in median if way.startswith("Rollyard")]
    ratios = [
        [f"{other}, {what}", *(f"{median[other][what] / median[way][what]:.3g}" for way in ours)]
        for other, what in (
            ("SWE-ReX session", "true"),
            ("docker exec, SDK", "true"),
            ("docker exec, CLI", "true"),
            ("tmux", "true"),
            ("tmux", "1 MB"),
            ("bash -c", "true"),
        )
        if other in median
    ]
    print()
    print(table(["times as long as", *ours], ratios))


def main() -> None:
    """Install the peer, or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--install", action="store_true", help="install SWE-ReX and end")
    arguments = parser.parse_args()
    if arguments.install:
        SWEREX.install()
        return
    if not SWEREX.is_installed():
        print(f"{SWEREX.requirement} is not installed and left out; --install installs it")
    print("load", *os.getloadavg())
    report(uvloop.run(measure(arguments.rounds)))
    print("load", *os.getloadavg())


if __name__ == "__main__":
    main()
