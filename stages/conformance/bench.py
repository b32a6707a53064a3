"""Where behaviours are tried: a backend with its settings, a sandbox that they share, and fresh ones on request."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import ExecResult, Labels, Plan, Sandbox, SandboxBackend, open_backend

EXEC_S: Final = 30.0
DEADLINE_S: Final = 1800.0
RENEW_S: Final = 5.0
_NUMBERS: Final = itertools.count(1)


class Unmet(Exception):
    """A sandbox did not behave as it must; the text says what was seen."""


class NotTold(Exception):
    """The behaviour cannot be tried here, for example for want of a program in the image; the text says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the kit opens a backend with. All of it can be told to another process."""

    backend: str
    settings: Mapping[str, Any]
    image: str = ""
    canary: str = ""  # "HOST PORT TEXT": a server that sandboxes must not reach, on this machine
    gateway: str = ""  # what the server behind the gateway's address answers; empty: there is none


@dataclass(kw_only=True)
class Bench:
    """Given to each behaviour."""

    setting: Setting
    backend: SandboxBackend
    shared: Sandbox | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The backend's."""
        return self.backend.capabilities

    @property
    def sandbox(self) -> Sandbox:
        """The shared sandbox; whatever a behaviour leaves in it lies below a folder of its own."""
        assert self.shared is not None
        return self.shared

    def name(self) -> str:
        """A name that no other behaviour uses, for a folder or process."""
        return f"b{next(_NUMBERS)}"

    def plan(self, **changes: Any) -> Plan:
        """The plan of a sandbox as the kit makes it."""
        plan = Plan(image=self.setting.image, network=self.capabilities.network("default"), deadline_s=DEADLINE_S)
        if plan.network == "gateway" and not self.setting.gateway:
            plan = replace(plan, network="none" if "none" in self.capabilities.networks else "open")
        return replace(plan, **changes)

    def labels(self) -> Labels:
        """Those of a sandbox of the kit."""
        now_ms = int(time.time() * 1000)
        rollout_id = f"check-{secrets.token_hex(6)}"
        return Labels(
            run="check", rollout_id=rollout_id, attempt=1, owner=f"check-{os.getpid()}", created_ms=now_ms, role="check"
        )

    @asynccontextmanager
    async def fresh(self, labels: Labels | None = None, **changes: Any) -> AsyncIterator[Sandbox]:
        """A sandbox of the behaviour's own, destroyed after it. `changes` are fields of `Plan`."""
        sandbox = await self.backend.create(labels or self.labels(), self.plan(**changes))
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


@asynccontextmanager
async def bench_of(setting: Setting) -> AsyncIterator[Bench]:
    """Open the backend; destroy at the end what the kit made. Raises SandboxError, ConfigError."""
    async with open_backend(setting.backend, setting.settings) as backend:
        bench = Bench(setting=setting, backend=backend)
        renewing = asyncio.create_task(_renew(backend))
        try:
            yield bench
        finally:
            renewing.cancel()
            await _clean_up(bench)


async def _renew(backend: SandboxBackend) -> None:
    """As a worker does."""
    while True:
        with suppress(SandboxError):
            await backend.renew_lease()
        await asyncio.sleep(RENEW_S)


async def _clean_up(bench: Bench) -> None:
    for ref, labels in await bench.backend.list_owned():
        if labels.role == "check" and labels.owner == f"check-{os.getpid()}":
            await (await bench.backend.open(ref)).destroy()


def expect(condition: object, text: str) -> None:
    """Raise Unmet with that text unless the condition is true."""
    if not condition:
        raise Unmet(text)


def same(got: object, wanted: object, what: str) -> None:
    """Raise Unmet unless both are equal."""
    if got != wanted:
        raise Unmet(f"{what}: {_short(got)} instead of {_short(wanted)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:75]} ... {text[-75:]}"


async def refused(what: str, attempt: Any) -> str:
    """The message of the SandboxError that the awaitable raises; Unmet when it raises none."""
    try:
        await attempt
    except SandboxError as error:
        return str(error)
    raise Unmet(f"{what} was not refused")


async def run(sandbox: Sandbox, script: str, timeout_s: float = EXEC_S, **more: Any) -> ExecResult:
    """Run a script to its end. Raises Unmet when it takes too long."""
    result = await sandbox.exec(script, timeout_s=timeout_s, **more)
    expect(not result.timed_out, f"{script[:80]!r} took over {timeout_s:g} s")
    return result


async def said(sandbox: Sandbox, script: str, **more: Any) -> str:
    """What a script printed. Raises Unmet when it fails."""
    result = await run(sandbox, script, **more)
    error = result.stderr.decode(errors="replace").strip()[-200:]
    expect(result.exit_code == 0, f"{script[:80]!r} ended with {result.exit_code}: {error}")
    return result.stdout.decode(errors="replace")


BEAT: Final = "while :; do echo . >>{0}; sleep 0.05; done"
"""A script that shows in a file that it lives."""


async def beats(sandbox: Sandbox, path: str) -> None:
    """Return when the file that BEAT writes is there. Raises Unmet."""
    for _ in range(200):
        if await sandbox.read_file(path, 1):
            return
        await asyncio.sleep(0.05)
    raise Unmet(f"the process that writes {path!r} did not begin within 10 s")


async def silent(sandbox: Sandbox, path: str, what: str) -> None:
    """Raise Unmet when the file that BEAT writes still grows."""
    before = await sandbox.read_file(path, 1 << 20)
    expect(before, f"{what} did not run at all")
    await asyncio.sleep(0.4)
    expect(await sandbox.read_file(path, 1 << 20) == before, f"{what} runs on")


def on_this_machine(text: str) -> list[int]:
    """Processes of this machine whose command line holds that text, as far as they can be seen from here."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def nap() -> str:
    """A number of seconds that no other process sleeps."""
    return f"1000.{secrets.randbelow(10**9):09d}"


def script_command(script: str) -> Command:
    """A detached process that runs a script."""
    return Command(("sh", "-c", script))
