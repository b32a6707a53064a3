"""The memory limit of bubblewrap sandboxes, best effort: somebody looks every second, and ends what is over it.

One look over /proc serves all sandboxes of this process. What counts is resident memory, shared pages once for each
process; who is over the limit by that is measured again with shared pages divided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from rollyard.stages.sandboxes.jail_kin import kin
from rollyard.stages.sandboxes.usage import used

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Watched:
    """One sandbox with a limit."""

    limit_bytes: int
    namespace: Callable[[], int | None]  # the user namespace that all its processes are below; None: it has ended
    end: Callable[[], Awaitable[None]]  # called when it is over its limit
    lost: Callable[[], Awaitable[None]]  # called when it has ended


class MemoryWatch:
    """Watches sandboxes from `start` to `stop`, by any name that its user chooses."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._watched: dict[str, Watched] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def add(self, name: str, watched: Watched) -> None:
        """Watch one more."""
        self._watched[name] = watched

    def forget(self, name: str) -> None:
        """Watch one less."""
        self._watched.pop(name, None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            if not self._watched:
                continue
            over, ended = await asyncio.to_thread(_look, dict(self._watched))
            for name, used_bytes in over.items():
                if (watched := self._watched.get(name)) is not None:
                    log.info("sandbox_out_of_memory", sandbox=name, bytes=used_bytes, limit_bytes=watched.limit_bytes)
                    await watched.end()
            for name in ended:
                if (watched := self._watched.pop(name, None)) is not None:
                    await watched.lost()


def _look(watched: dict[str, Watched]) -> tuple[dict[str, int], list[str]]:
    """Who uses more than allowed, and how much; and who has ended."""
    members = kin()
    over: dict[str, int] = {}
    ended: list[str] = []
    for name, one in watched.items():
        namespace = one.namespace()
        if namespace is None:
            ended.append(name)
            continue
        pids = members.get(namespace, [])
        if sum(_resident(pid) for pid in pids) > one.limit_bytes:
            shared_once = sum(_proportional(pid) for pid in pids)
            if shared_once > one.limit_bytes:
                over[name] = shared_once
    return over, ended


def _resident(pid: int) -> int:
    found = used(pid)
    return found.memory_bytes if found is not None else 0


def _proportional(pid: int) -> int:
    """Resident bytes with shared pages divided among those that have them; all of them where it is not told."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
