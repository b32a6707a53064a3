"""Asking the gateways that live what they see of the pool: who has heard of a change, what calls still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.leases import LeaseView
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, DecodeError, WaitTimeout
from rollyard.schemas.weights import PoolView

Heard = Callable[[int, str], None]
"""Called with (calls that run, what is waited for) after each round of questions."""

ANSWER_TIMEOUT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.02
_MAX_PAUSE_S: Final = 0.5


class Gateways:
    """All gateways that hold a lease. Make one with `async with Gateways.following(bus) as gateways`."""

    def __init__(self, bus: Bus, leases: LeaseView) -> None:
        self._bus = bus
        self._leases = leases

    @classmethod
    @asynccontextmanager
    async def following(cls, bus: Bus) -> AsyncIterator[Gateways]:
        """Follow their leases."""
        async with LeaseView.following(bus, subjects.GATEWAYS) as leases:
            yield cls(bus, leases)

    async def ask(self) -> dict[str, PoolView | None]:
        """What each gateway sees, by incarnation; None from one whose lease lives and that does not answer."""
        alive = [owner for owner in self._leases.owners() if self._leases.alive(owner)]
        async with asyncio.TaskGroup() as group:
            asked = {owner: group.create_task(self._ask(owner)) for owner in alive}
        return {owner: task.result() for owner, task in asked.items()}

    async def _ask(self, owner: str) -> PoolView | None:
        try:
            answer = await self._bus.request(subjects.gateway_pool_subject(owner), timeout_s=ANSWER_TIMEOUT_S)
            view: PoolView = decode(answer.data, PoolView)
        except (BusError, DecodeError):
            if self._bus.closed.is_set():
                raise
            return None
        return view

    async def settled(
        self,
        server_id: str,
        revision: int,
        *,
        timeout_s: float,
        idle: bool = False,
        healthy: bool = False,
        heard: Heard | None = None,
    ) -> None:
        """Return when every gateway has heard of the change of the pool at `revision`, and, where it is asked for, has
        no call at the server (`idle`) or finds it healthy.

        One that does not answer is waited for until its lease runs out: it may know only the old entry, and send calls.
        Raises WaitTimeout, which says who is waited for.
        """
        waits_for, pause_s = "the gateways", _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    views = await self.ask()
                    calls = sum(view.of(server_id).calls for view in views.values() if view is not None)
                    reasons = [
                        f"gateway {owner}: {reason}"
                        for owner, view in views.items()
                        if (reason := _unsettled(view, server_id, revision, idle=idle, healthy=healthy))
                    ]
                    if not reasons:
                        return
                    waits_for = "; ".join(reasons)
                    if heard is not None:
                        heard(calls, waits_for)
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _MAX_PAUSE_S)
        except TimeoutError:
            hint = "is the server up? Its log tells" if healthy else "give it more time"
            raise WaitTimeout(f"server {server_id}, after {timeout_s:g} s: {waits_for}", hint=hint) from None


def _unsettled(view: PoolView | None, server_id: str, revision: int, *, idle: bool, healthy: bool) -> str:
    """What is still missing at one gateway; empty: nothing."""
    if view is None:
        return "it does not answer"
    if view.revision < revision:
        return "it has not heard of the change"
    server = view.of(server_id)
    if idle and server.calls:
        return f"{server.calls} {'call runs' if server.calls == 1 else 'calls run'}"
    if healthy and not server.healthy:
        return server.trouble or "it does not find the server healthy"
    return ""
