"""SDK clients used in turn, each with connections of its own, and patience with a service that is busy.

One client, that is one pool of connections, is a bottleneck past about 1,000 agents.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from e2b import E2B, AsyncSandbox

from rollyard.stages.sandboxes.e2b_errors import converted, is_busy, is_unreachable

Result = TypeVar("Result")

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 20.0
UNREACHABLE_TRIES: Final = 1
CLIENT_HEADER: Final = "X-Rollyard-Client"


class PoolKey(str):
    """An HTTP version by which the SDK finds one of its connection pools.

    The SDK keeps one pool for each version for the whole process. Keys of the same version and another number are equal
    to that version, and not to each other, so that each gets a pool.
    """

    number: int

    def __new__(cls, version: str, number: int) -> PoolKey:
        """The key of pool `number`."""
        key = super().__new__(cls, version)
        key.number = number
        return key

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) and (not isinstance(other, PoolKey) or self.number == other.number)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((str(self), self.number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How E2B is reached. An empty address: what the SDK finds in the environment, else E2B's cloud."""

    api_key: str
    domain: str = ""
    api_url: str = ""
    sandbox_url: str = ""
    request_timeout_s: float = 60.0


class Clients:
    """`count` SDK clients."""

    def __init__(self, connection: Connection, count: int, max_tries: int) -> None:
        self._clients = [_client(connection, number) for number in range(count)]
        self._turns = itertools.cycle(self._clients)
        self._max_tries = max_tries

    def next(self) -> type[AsyncSandbox]:
        """The next client's sandbox class, for what concerns no sandbox yet."""
        return next(self._turns)

    def of(self, sandbox_id: str) -> type[AsyncSandbox]:
        """The client whose connections carry what concerns this sandbox, the same in every process."""
        return self._clients[zlib.crc32(sandbox_id.encode()) % len(self._clients)]

    async def patiently(self, what: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do `work`, which may be done twice, until E2B takes it, within `max_tries`. Raises SandboxError."""
        pauses = backoff_pauses(self._max_tries)
        unreachable = 0
        with converted(what):
            while True:
                try:
                    return await work()
                except Exception as error:
                    unreachable += is_unreachable(error)
                    if unreachable > UNREACHABLE_TRIES or not (is_busy(error) or is_unreachable(error)):
                        raise
                    pause_s = next(pauses, None)
                    if pause_s is None:
                        raise
                await asyncio.sleep(pause_s)


def backoff_pauses(max_tries: int, random_unit: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait before the second try, the third, and so on: half of it fixed, half by chance, so that many
    workers which were refused together do not come back together."""
    for number in range(max_tries - 1):
        most_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**number)
        yield most_s * (0.5 + 0.5 * random_unit())


def _client(connection: Connection, number: int) -> type[AsyncSandbox]:
    version = PoolKey(os.environ.get("E2B_HTTP_VERSION") or "2", number)
    options: dict[str, Any] = {
        "api_key": connection.api_key,
        "domain": connection.domain or None,
        "api_url": connection.api_url or None,
        "sandbox_url": connection.sandbox_url or None,
        "request_timeout": connection.request_timeout_s,
        "debug": False,  # in its debug mode the SDK pretends to end sandboxes
        "http_version": version,
        "api_headers": {CLIENT_HEADER: str(number)},
    }
    return E2B(**options).AsyncSandbox
