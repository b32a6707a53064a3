"""Asking for a weight update: one request to the gateways, progress until the report. A gateway does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import nats.errors
from nats.aio.msg import Msg

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusAway, BusError
from rollyard.schemas.weights import WeightProgress, WeightReport, WeightUpdate

Told = Callable[[WeightProgress], None]
SILENCE_S: Final = 15.0
_REPEAT: Final = "repeat the same update: servers that have it are left alone, the others are mended"


async def request_update(bus: Bus, update: WeightUpdate, told: Told | None = None) -> WeightReport:
    """Have a gateway carry out an update, and return what came of it. `told` hears of every step, more than once.

    Raises BusError when no gateway runs, when the one at work falls silent, or when it could not go on.
    """
    inbox = bus.client.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await bus.client.subscribe(inbox, cb=arrived.put)
    try:
        await bus.client.publish(subjects.WEIGHTS_SUBJECT, encode(update), reply=inbox)
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await arrived.get()
            except TimeoutError:
                raise BusAway(
                    f"the gateway fell silent in the middle of the weight update to {update.version}", hint=_REPEAT
                ) from None
            if message.headers and message.headers.get("Status") == "503":
                raise BusError("no gateway runs that could update weights", hint="start one: `rollyard gateway`")
            news: WeightProgress | WeightReport = decode(message.data, WeightProgress | WeightReport)
            if isinstance(news, WeightReport):
                if news.error:
                    raise BusError(f"the weight update to {update.version} failed: {news.error}", hint=_REPEAT)
                return news
            if told is not None:
                told(news)
    except BusError:
        raise
    except (nats.errors.Error, OSError) as error:
        raise BusAway(f"the weight update could not be asked for: {error!r}", hint="is nats-server running?") from error
    finally:
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
