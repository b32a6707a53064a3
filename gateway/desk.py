"""What a gateway does for those who change the pool: it answers what it sees there, and carries out weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

import nats.errors
import structlog
from nats.aio.msg import Msg

from rollyard.gateway.engines.control import ServerControl
from rollyard.gateway.pool import ServerPool
from rollyard.gateway.weights import Tell, WeightUpdater
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.gateways import Gateways
from rollyard.pipeline.llm_servers import LlmServers
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, RollyardError
from rollyard.schemas.weights import PoolView, WeightProgress, WeightReport, WeightUpdate

log = structlog.get_logger(__name__)

BEAT_S: Final = 1.0
_QUEUE: Final = "gateways"


class PoolDesk:
    """Of one gateway. `run()` must be running."""

    def __init__(self, bus: Bus, incarnation: str, pool: ServerPool, controls: Mapping[str, ServerControl]) -> None:
        self.bus = bus
        self.incarnation = incarnation
        self.pool = pool
        self.servers = LlmServers(bus)
        self.ready = asyncio.Event()
        """Set once it listens."""
        self._controls = controls
        self._gateways: Gateways | None = None
        self._updates: set[asyncio.Task[WeightReport]] = set()

    async def run(self) -> None:
        """Answer until cancelled. An update that is under way then is given up, and who asked for it is told."""
        async with Gateways.following(self.bus) as self._gateways, asyncio.TaskGroup() as group:

            async def take(message: Msg) -> None:
                group.create_task(self._carry_out(message))

            async with (
                self._subscribed(subjects.gateway_pool_subject(self.incarnation), self._answer),
                self._subscribed(subjects.WEIGHTS_SUBJECT, take, queue=_QUEUE),
            ):
                self.ready.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    for update in self._updates:
                        update.cancel()

    def gateways(self) -> Gateways:
        """Every gateway, to be asked. Raises BusError while `run` does not run."""
        if self._gateways is None:
            raise BusError("this gateway is starting", hint="ask again in a moment")
        return self._gateways

    async def update(self, update: WeightUpdate, tell: Tell) -> WeightReport:
        """Carry out a weight update. Raises BusError, ConfigError; what fails at a server stands in the report.

        It goes on when whoever waits for it goes away, and ends with `run`.
        """
        log.info("weight_update", update=update.update_id, version=update.version, how=update.how)
        updater = WeightUpdater(self.servers, self._controls, self.gateways())
        task = asyncio.create_task(updater.run(update, tell))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    def view(self) -> PoolView:
        """The pool as this gateway sees it."""
        return PoolView(
            gateway=self.incarnation,
            revision=self.pool.revision,
            servers=self.pool.view(),
            at_ms=time.time_ns() // 1_000_000,
        )

    async def _answer(self, message: Msg) -> None:
        await self._reply(message, encode(self.view()))

    async def _carry_out(self, message: Msg) -> None:
        latest: dict[str, WeightProgress] = {}

        def tell(progress: WeightProgress) -> None:
            if progress.step in ("done", "failed") or latest.get(progress.server_id) != progress:
                beat.set()
            latest[progress.server_id] = progress

        beat = asyncio.Event()
        beats = asyncio.create_task(self._beat(message, latest, beat))
        report = WeightReport(error="the gateway at work stopped")
        try:
            report = await self.update(decode(message.data, WeightUpdate), tell)
        except RollyardError as error:
            report = WeightReport(error=str(error))
        except Exception:  # who asked is told, and the gateway serves on, whatever is broken
            log.exception("weight_update_broken")
            report = WeightReport(error="the gateway at work failed; see its log")
        finally:
            beats.cancel()
            await self._reply(message, encode(report))

    async def _beat(self, message: Msg, latest: Mapping[str, WeightProgress], beat: asyncio.Event) -> None:
        """Tell how far each server is: at once when that changed, and every second, so that silence means death."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await beat.wait()
            beat.clear()
            for progress in list(latest.values()):
                await self._reply(message, encode(progress))

    async def _reply(self, message: Msg, data: bytes) -> None:
        if not message.reply:
            return
        try:
            await self.bus.client.publish(message.reply, data)
        except (nats.errors.Error, OSError) as error:
            log.info("reply_not_sent", error=repr(error))

    @asynccontextmanager
    async def _subscribed(
        self, subject: str, handle: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> AsyncIterator[None]:
        subscription = await self.bus.client.subscribe(subject, queue=queue, cb=handle)
        try:
            yield
        finally:
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
