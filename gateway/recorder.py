"""Calls into the log: an intent before anything comes of a call, and one end for every intent that was sent.

Contract: docs/architecture.md section 5.3.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog
from msgspec import structs

from rollyard.gateway.metrics import GatewayMetrics
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.errors import BlobError, BusError, TooLarge
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.subjects import log_subject

log = structlog.get_logger(__name__)

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 5.0


class Recorder:
    """Writes the calls of one gateway process. Use inside `running()`."""

    def __init__(self, bus: Bus, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._intents: set[asyncio.Task[int]] = set()

    @asynccontextmanager
    async def running(self, flush_s: float) -> AsyncIterator[None]:
        """Until the block ends; then ends that are owed get `flush_s` more to reach the log."""
        try:
            yield
        finally:
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=flush_s)
                if late:
                    log.error("ends_never_logged", count=len(late), hint="their calls will count as lost")
                for task in late:
                    task.cancel()
            for intent in list(self._intents):
                intent.cancel()

    @property
    def owed(self) -> int:
        """Ends not yet acknowledged."""
        return len(self._tasks)

    def intent(self, intent: CallIntent) -> asyncio.Task[int]:
        """Send an intent; the task gives its sequence, or raises BusError. From now on an end is owed."""
        # What cannot be encoded is known before that.
        task = asyncio.create_task(self._intend(intent, encode(intent)))
        self._intents.add(task)
        task.add_done_callback(self._intended)
        return task

    def _intended(self, task: asyncio.Task[int]) -> None:
        self._intents.discard(task)
        # Nobody may be waiting any more when it fails.
        if not task.cancelled():
            task.exception()

    async def _intend(self, intent: CallIntent, data: bytes) -> int:
        try:
            return await self._bus.publish(
                log_subject(intent.run, intent.rollout_id, "call"), data, msg_id=f"{intent.call_id}.intent"
            )
        except BlobError as error:
            raise BusError(f"the intent of a call cannot be stored: {error}") from error

    def end(self, end: CallEnd, on_logged: Callable[[int], None]) -> asyncio.Future[int]:
        """Log an end, for as long as it takes. The future gives its sequence, after `on_logged` was called with it.

        Raises TooLarge, from the future, when the record can never be stored; a short one is logged in its place.
        """
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting any more when it fails.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        task = asyncio.create_task(self._repeat(end, on_logged, done))
        self._tasks.add(task)
        self._metrics.owed.set(len(self._tasks))
        task.add_done_callback(self._settled)
        return done

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._metrics.owed.set(len(self._tasks))

    async def _repeat(self, end: CallEnd, on_logged: Callable[[int], None], done: asyncio.Future[int]) -> None:
        subject = log_subject(end.run, end.rollout_id, "call")
        data, pause_s = encode(end), RETRY_MIN_S
        while True:
            try:
                seq = await self._bus.publish(subject, data, msg_id=f"{end.call_id}.end")
            except TooLarge as error:
                log.error("end_too_large", call_id=end.call_id, error=str(error))
                if not done.done():
                    done.set_exception(error)
                end = _shortened(end, error)
                data = encode(end)
            except (BusError, BlobError) as error:
                log.warning("end_not_logged_yet", call_id=end.call_id, error=str(error), again_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MAX_S)
            else:
                on_logged(seq)
                if not done.done():
                    done.set_result(seq)
                return


def _shortened(end: CallEnd, error: TooLarge) -> CallEnd:
    return structs.replace(
        end,
        status="error",
        error=f"the record of the call was too large: {error}"[:2000],
        prompt_ids=TokenIds(),
        completion_ids=TokenIds(),
        logprobs=Logprobs(),
        reply=None,
    )
