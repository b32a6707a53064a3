"""Many answers to one request: a whole page, a slow one, none at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.replies import Replies
from rollyard.schemas.errors import BusAway

TIMEOUT_S = 1.0


@pytest.fixture
async def replies(bus: Bus) -> Replies:
    made = Replies(bus.client)
    await made.start()
    return made


async def answering(bus: Bus, subject: str, work: Callable[[str], Awaitable[None]]) -> None:
    """Somebody who answers requests on a subject."""

    async def answer(message: Any) -> None:
        await work(message.reply)

    await bus.client.subscribe(subject, cb=answer)


def is_last(message: Any) -> bool:
    return bool(message.data == b"end")


async def test_all_answers_come_in_their_order(bus: Bus, replies: Replies) -> None:
    async def work(reply: str) -> None:
        for number in range(500):
            await bus.client.publish(reply, str(number).encode())
        await bus.client.publish(reply, b"end")
        await bus.client.publish(reply, b"after the end")

    await answering(bus, "page", work)
    answers = await replies.ask_many("page", b"", is_last, TIMEOUT_S)
    assert [answer.data for answer in answers] == [*(str(number).encode() for number in range(500)), b"end"]


async def test_a_slow_page_is_waited_for_as_long_as_something_comes(bus: Bus, replies: Replies) -> None:
    async def work(reply: str) -> None:
        for _ in range(6):
            await asyncio.sleep(TIMEOUT_S / 4)
            await bus.client.publish(reply, b"still there")
        await bus.client.publish(reply, b"end")

    await answering(bus, "slow", work)
    assert len(await replies.ask_many("slow", b"", is_last, TIMEOUT_S)) == 7


@pytest.mark.parametrize("before", [0, 3])
async def test_silence_ends_the_wait(bus: Bus, replies: Replies, before: int) -> None:
    async def work(reply: str) -> None:
        for _ in range(before):
            await bus.client.publish(reply, b"then nothing")

    await answering(bus, "silent", work)
    with pytest.raises(BusAway, match="no answer from the bus within 1 s to a request on silent"):
        await replies.ask_many("silent", b"", is_last, TIMEOUT_S)


async def test_a_lost_connection_ends_the_wait(bus: Bus, replies: Replies) -> None:
    async def work(reply: str) -> None:
        replies.connection_lost()

    await answering(bus, "lost", work)
    with pytest.raises(BusAway, match="the connection to the bus was lost"):
        await replies.ask_many("lost", b"", is_last, 30.0)
