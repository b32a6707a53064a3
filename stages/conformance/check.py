"""Trying behaviours on a backend, a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from rollyard.schemas.errors import RollyardError
from rollyard.stages.conformance.behaviour import Behaviour, Outcome, Verdict
from rollyard.stages.conformance.bench import Bench, NotTold, Setting, Unmet, bench_of
from rollyard.stages.sandbox import Sandbox

Report = Callable[[Verdict], None]
AT_A_TIME: Final = 4


async def check(
    setting: Setting, behaviours: Sequence[Behaviour], report: Report = lambda _: None, *, at_a_time: int = AT_A_TIME
) -> list[Verdict]:
    """Try them all; `report` hears of each as it is known. Raises SandboxError, ConfigError when the backend cannot be
    opened, or makes no sandbox at all."""
    async with bench_of(setting) as bench:
        shared, slots = _Shared(bench), asyncio.Semaphore(at_a_time)
        if bench.capabilities.processes:
            await shared.get()

        async def one(behaviour: Behaviour) -> Verdict:
            async with slots:
                verdict = await _verdict(bench, shared, behaviour)
            report(verdict)
            return verdict

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(behaviour)) for behaviour in behaviours]
        return [task.result() for task in tasks]


class _Shared:
    """The sandbox that behaviours share, until one of them fails: then those that come later get another."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._lock = asyncio.Lock()
        self._sandbox: Sandbox | None = None

    async def get(self) -> Sandbox:
        async with self._lock:
            if self._sandbox is None:
                self._sandbox = await self._bench.backend.create(self._bench.labels(), self._bench.plan())
            return self._sandbox

    def distrust(self) -> None:
        self._sandbox = None  # it is destroyed at the end, since others may still be at work in it


async def _verdict(bench: Bench, shared: _Shared, behaviour: Behaviour) -> Verdict:
    """Try one. It never raises: whatever happens is the backend's doing, and a failure."""
    began = time.monotonic()
    outcome, reason = await _outcome(bench, shared, behaviour)
    if outcome == "fail":
        shared.distrust()
    return Verdict(behaviour, outcome, reason, time.monotonic() - began)


async def _outcome(bench: Bench, shared: _Shared, behaviour: Behaviour) -> tuple[Outcome, str]:
    if lack := _lack(bench, behaviour):
        return "not offered", lack
    try:
        async with asyncio.timeout(behaviour.max_s):
            await behaviour.tried(replace(bench, shared=await shared.get()))
    except NotTold as error:
        return "not offered", str(error)
    except Unmet as error:
        return "fail", str(error)
    except TimeoutError:
        return "fail", f"it took over {behaviour.max_s:g} s"
    except RollyardError as error:
        return "fail", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a backend may raise anything, and the others are tried all the same
        return "fail", _first(error)
    return "pass", ""


def _lack(bench: Bench, behaviour: Behaviour) -> str:
    if not bench.capabilities.processes:
        return "it has no place for files and processes"
    return behaviour.lack(bench.capabilities)


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
