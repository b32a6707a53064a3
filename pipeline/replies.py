"""Request and reply over one connection: a single inbox, a timer for each open request, one or many answers.

nats-py's own `publish_async` leaves futures hanging after a reconnect; here every request ends, with an answer or with
a BusAway.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from rollyard.schemas.errors import BusAway


@dataclass(slots=True)
class _Gathering:
    """The answers to one request, until the last one is there."""

    is_last: Callable[[Msg], bool]
    whole: asyncio.Future[list[Msg]]
    answers: list[Msg] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    seen: int = 0
    quiet: int = 0

    def add(self, message: Msg) -> None:
        """Take an answer; what comes after the last one is none."""
        if self.whole.done():
            return
        self.answers.append(message)
        if self.is_last(message):
            self.whole.set_result(self.answers)

    def is_silent(self) -> bool:
        """Whether nothing came since the last two looks: one look alone may be late, after a loop that was held up."""
        self.quiet = self.quiet + 1 if len(self.answers) == self.seen else 0
        self.seen = len(self.answers)
        return self.quiet == 2


class Replies:
    """Sends requests with reply subjects under one inbox and hands the answers back."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prefix = client.new_inbox()
        self._numbers = itertools.count()
        self._single: dict[str, asyncio.Future[Msg]] = {}
        self._many: dict[str, _Gathering] = {}

    async def start(self) -> None:
        """Subscribe to the inbox. Call once, before the first request."""
        await self._client.subscribe(f"{self._prefix}.*", cb=self._deliver, pending_msgs_limit=0, pending_bytes_limit=0)

    def connection_lost(self) -> None:
        """End every open request with BusAway: the server that has it, if one has it, cannot answer any more."""
        for answer in self._single.values():
            if not answer.done():
                answer.set_exception(_lost())
        for gathering in self._many.values():
            if not gathering.whole.done():
                gathering.whole.set_exception(_lost())

    async def ask(self, subject: str, data: bytes, headers: dict[str, str] | None, timeout_s: float) -> Msg:
        """One request, one answer. Raises BusAway when none comes within `timeout_s`."""
        loop = asyncio.get_running_loop()
        token = str(next(self._numbers))
        answer: asyncio.Future[Msg] = loop.create_future()
        self._single[token] = answer
        timer = loop.call_later(timeout_s, _give_up, answer, subject, timeout_s)
        try:
            await self._send(subject, data, f"{self._prefix}.{token}", headers)
            return await answer
        finally:
            timer.cancel()
            self._single.pop(token, None)

    async def ask_many(self, subject: str, data: bytes, is_last: Callable[[Msg], bool], timeout_s: float) -> list[Msg]:
        """One request, answers until `is_last` says so, that one included. Raises BusAway after silence."""
        loop = asyncio.get_running_loop()
        token = str(next(self._numbers))
        gathering = self._many[token] = _Gathering(is_last, loop.create_future())

        def look() -> None:
            if gathering.whole.done():
                return
            if gathering.is_silent():
                gathering.whole.set_exception(_silence(subject, timeout_s))
                return
            gathering.timer = loop.call_later(timeout_s / 2, look)

        gathering.timer = loop.call_later(timeout_s / 2, look)
        try:
            await self._send(subject, data, f"{self._prefix}.{token}", None)
            return await gathering.whole
        finally:
            gathering.timer.cancel()
            self._many.pop(token, None)

    async def _send(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> None:
        await self._client.publish(subject, data, reply=reply, headers=headers)

    async def _deliver(self, message: Msg) -> None:
        token = message.subject.rsplit(".", 1)[1]
        answer = self._single.get(token)
        if answer is not None:
            if not answer.done():
                answer.set_result(message)
            return
        gathering = self._many.get(token)
        if gathering is not None:
            gathering.add(message)


def _give_up(answer: asyncio.Future[Any], subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(_silence(subject, timeout_s))


def _silence(subject: str, timeout_s: float) -> BusAway:
    return BusAway(
        f"no answer from the bus within {timeout_s:g} s to a request on {subject[:60]}",
        hint="is nats-server running? If its log shows write errors, make room on its disk and start it again",
    )


def _lost() -> BusAway:
    return BusAway("the connection to the bus was lost before an answer came", hint="is nats-server running?")
