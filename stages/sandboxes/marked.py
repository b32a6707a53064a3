"""Killing by mark: processes of a local sandbox are found by a variable in their environment, wherever they went.

A process that left its group and its parent still carries the environment it was started with. Only Linux shows it
(/proc); elsewhere nothing is found.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.census import CENSUS, VARIABLE, Key, at_work
from rollyard.stages.sandboxes.families import Families

ROUNDS: Final = 20
PAUSE: Final = 3.0
MAX_PAUSE_S: Final = 0.1

Target = tuple[str, int | None]
"""A mark, and a user namespace."""


class MarkedProcesses:
    """Kills processes by mark. One look over /proc serves all who ask meanwhile.

    After each look follows a pause of three times its length.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Target, asyncio.Future[int]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def kill(self, mark: str, namespace: int | None = None) -> None:
        """Kill until none is left. `mark` is `SANDBOX.NAME.`, or `SANDBOX.` for all of a sandbox; `namespace` is a user
        namespace right below our own, of which all are killed too.

        Raises SandboxError when new ones come faster than they can be killed.
        """
        for number in range(ROUNDS):
            if not await self._next_look((mark, namespace)):
                return
            # The killed die in their own time.
            await asyncio.sleep(min(0.001 * 2**number, MAX_PAUSE_S))
        raise SandboxError(
            f"processes marked {mark!r} start new ones faster than they can be killed",
            hint=f"look for {VARIABLE}={mark} in /proc/*/environ",
        )

    def _next_look(self, target: Target) -> asyncio.Future[int]:
        """How many the next look killed."""
        killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.append((target, killed))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_asked())
        return killed

    async def _look_while_asked(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, []
            began = time.monotonic()
            killed = await asyncio.to_thread(kill_once, {target for target, _ in asked})
            for target, future in asked:
                if not future.done():
                    future.set_result(killed[target])
            await asyncio.sleep((time.monotonic() - began) * PAUSE)


def kill_once(targets: Collection[Target]) -> dict[Target, int]:
    """Look once at every process and kill those that carry a mark, or are in a namespace; returns how many of each."""
    by_mark: dict[bytes, list[Target]] = {}
    by_namespace: dict[int | None, list[Target]] = {}
    for target in targets:
        by_mark.setdefault(target[0].encode(), []).append(target)
        if target[1] is not None:
            by_namespace.setdefault(target[1], []).append(target)
    killed = dict.fromkeys(targets, 0)
    families = Families() if by_namespace else None
    seen: set[Key] = set()
    # A process may start another one and end between the listing and the look at it: list until nothing is new.
    while new := CENSUS.processes() - seen:
        seen |= new
        for process in new:
            found: set[Target] = set()
            if mark := CENSUS.mark(process):
                found.update(by_mark.get(mark, ()), by_mark.get(_sandbox_of(mark), ()))
            if families is not None and (family := CENSUS.family(process, families)) is not None:
                found.update(by_namespace.get(family, ()))
            if not found or not at_work(process[0]):
                continue
            with suppress(ProcessLookupError):
                os.kill(int(process[0]), signal.SIGKILL)
            for target in found:
                killed[target] += 1
    return killed


def marked_processes(mark: str) -> list[str]:
    """The ids of the living processes that carry `mark`, which is as for `kill`."""
    wanted = mark.encode()
    return [
        process[0] for process in CENSUS.processes() if CENSUS.mark(process).startswith(wanted) and at_work(process[0])
    ]


def _sandbox_of(mark: bytes) -> bytes:
    return mark.partition(b".")[0] + b"."
