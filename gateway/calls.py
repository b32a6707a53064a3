"""What the calls of a gateway process share: who is in flight, who may join, and how they end with the process."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import structs

from rollyard.gateway.call import Call
from rollyard.gateway.closed import ClosedSessions
from rollyard.gateway.desk import PoolDesk
from rollyard.gateway.engines.engine import Engine
from rollyard.gateway.exchange import Finished, ModelRequest, Update, same_request
from rollyard.gateway.history import Canonical
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.logguard import LogGuard
from rollyard.gateway.metrics import GatewayMetrics
from rollyard.gateway.models import RunModels, resolve_model
from rollyard.gateway.pool import ServerPool
from rollyard.gateway.recorder import Recorder
from rollyard.gateway.refusal import Refusal, session_closed
from rollyard.gateway.renderers import Renderers
from rollyard.gateway.sessions import Sessions
from rollyard.gateway.settings import GatewaySettings
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.single_error import single_error


@dataclass(slots=True, kw_only=True)
class Gateway:
    """What every call of a process shares, and the one thing that it does: calls."""

    bus: Bus
    incarnation: str
    settings: GatewaySettings
    engines: Mapping[str, Engine]
    pool: ServerPool
    desk: PoolDesk
    sessions: Sessions
    canonical: Canonical
    recorder: Recorder
    renderers: Renderers
    guard: LogGuard
    metrics: GatewayMetrics
    run_models: RunModels
    in_flight: dict[str, set[Call]] = field(default_factory=lambda: defaultdict(set))
    closed: ClosedSessions = field(init=False)

    def __post_init__(self) -> None:
        self.closed = ClosedSessions(self.bus, self._session_closed)

    def _session_closed(self, session: str) -> None:
        for call in list(self.in_flight.get(session, ())):
            call.abort("its session was closed", session_closed())
        self.sessions.drop(session)

    def model_of(self, grant: SessionGrant, request: ModelRequest) -> str:
        """The served model of a request, see gateway/models.py."""
        return resolve_model(request.model, grant, self.run_models.of(grant.run))

    async def stop(self) -> None:
        """Abort the calls that are left, and wait until each has handed its end to the recorder."""
        calls = [call for session in self.in_flight.values() for call in session]
        for call in calls:
            call.abort("the gateway stopped")
        tasks = [call.task for call in calls if call.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.settings.flush_s)
            for task in late:
                task.cancel()

    async def updates(self, grant: SessionGrant, request: ModelRequest) -> AsyncGenerator[Update, None]:
        """Make the calls of a request. A call's `Finished` comes last, and only once its end is in the log.

        Raises Refusal. Closing the generator before the last `Finished` aborts what runs.
        """
        if request.n == 1:
            call = self._joinable(grant, request) or self._begin(grant, request)
            async with aclosing(call.audience.listen()) as updates:
                async for update in updates:
                    yield update
            return
        queue: asyncio.Queue[Update] = asyncio.Queue()

        async def follow(call: Call) -> None:
            async with aclosing(call.audience.listen()) as updates:
                async for update in updates:
                    queue.put_nowait(update)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for choice in range(request.n):
                    group.create_task(follow(self._begin(grant, structs.replace(request, n=1), choice)))
                finished = 0
                while finished < request.n:
                    update = await queue.get()
                    finished += isinstance(update, Finished)
                    yield update

    async def finished(self, grant: SessionGrant, request: ModelRequest) -> list[Finished]:
        """The replies of a request, one for each of its n choices, in their order. Raises Refusal."""
        async with aclosing(self.updates(grant, request)) as updates:
            replies = [update async for update in updates if isinstance(update, Finished)]
        if len(replies) != request.n:
            raise Refusal(500, "internal_error", "the call ended without a reply", hint="see the gateway's log")
        return sorted(replies, key=lambda reply: reply.choice)

    def _begin(self, grant: SessionGrant, request: ModelRequest, choice: int = 0) -> Call:
        call = Call(self, grant, request, choice)
        call.task = asyncio.create_task(call.run())
        return call

    def _joinable(self, grant: SessionGrant, request: ModelRequest) -> Call | None:
        """A call in flight that this request repeats.

        Requests that come together are wanted several times; a retry comes when its agent has waited for a while.
        """
        latest = time.time() - self.settings.join_after_s
        for call in self.in_flight.get(grant.session(), ()):
            if call.at <= latest and call.joinable and same_request(call.request, request):
                self.metrics.joined.inc()
                return call
        return None
