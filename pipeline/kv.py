"""Typed key-value buckets; `nats kv` reads them too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.follow import CaughtUp, follow
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas import subjects
from rollyard.schemas.errors import Conflict, DecodeError

log = structlog.get_logger(__name__)

T = TypeVar("T")
_OPERATION = "KV-Operation"


class Bucket(Generic[T]):
    """One bucket whose values are records of type `kind`. Revisions are stream sequences."""

    def __init__(self, bus: Bus, name: str, kind: type[T] | Any) -> None:
        self.bus = bus
        self.name = name
        self.kind = kind
        self._prefix = subjects.kv_subject(name, "")

    async def get(self, key: str) -> tuple[T, int] | None:
        """(value, revision) from the stream's leader, or None."""
        return self._value(await self.bus.last(self._prefix + key))

    async def get_direct(self, key: str) -> tuple[T, int] | None:
        """The same from any server; for values that never change once written."""
        return self._value(await self.bus.get_direct(self._prefix + key))

    async def put(self, key: str, value: T) -> int:
        """Write whatever stood there; returns the revision."""
        return await self.bus.publish(self._prefix + key, encode(value))

    async def create(self, key: str, value: T) -> int:
        """Write a key that is absent or deleted. Raises Conflict when it has a value."""
        try:
            return await self.update(key, value, 0)
        except Conflict:
            standing = await self.bus.last(self._prefix + key)
            if standing is None or _OPERATION not in standing.headers:
                raise
            return await self.update(key, value, standing.seq)

    async def update(self, key: str, value: T, revision: int) -> int:
        """Write if the revision is still `revision`. Raises Conflict."""
        return await self.bus.compare_and_set(self._prefix + key, encode(value), revision)

    async def delete(self, key: str) -> None:
        """Leave a delete marker; watchers see None."""
        await self.bus.request(self._prefix + key, headers={_OPERATION: "DEL"})

    async def items(self, key_filter: str = ">") -> AsyncIterator[tuple[str, T, int]]:
        """(key, value, revision) of every key under a filter, as stored now."""
        async for stored in self.bus.read(subjects.kv_stream(self.name), self._prefix + key_filter):
            found = self._value(stored)
            if found is not None:
                yield stored.subject[len(self._prefix) :], *found

    async def watch(self, key_filter: str = ">") -> AsyncIterator[tuple[str, T | None, int]]:
        """(key, value or None for deleted, revision): what is stored, then every change, without end.

        After the stored values comes one item with the empty key: the watcher is up to date from there on. A value that
        cannot be read is logged and left out.
        """
        flow = follow(self.bus, subjects.kv_stream(self.name), self._prefix + key_filter, newest_of_each=True)
        async for stored in flow:
            if isinstance(stored, CaughtUp):
                yield "", None, 0
                continue
            try:
                found = self._value(stored)
            except DecodeError as error:
                # One bad value, which anybody may have written, must not blind every follower of the bucket.
                log.error("value_not_readable", error=str(error))
                continue
            yield stored.subject[len(self._prefix) :], found[0] if found else None, stored.seq

    def _value(self, stored: Stored | None) -> tuple[T, int] | None:
        if stored is None or _OPERATION in stored.headers:
            return None
        try:
            value: T = decode(stored.data, self.kind)
        except DecodeError as error:
            where = f"{stored.subject[len(self._prefix) :]} in bucket {self.name}"
            raise DecodeError(f"{where}: {error.message}", hint=error.hint) from error
        return value, stored.seq
