"""Parts of call records that recur in every session, tool definitions and system prompts: kept once, by content.

Such a part lies in the blob store, and the record holds its name (`CallIntent.contents`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

import msgspec
from msgspec import structs

from rollyard.pipeline.blobs import BlobStore
from rollyard.schemas.call import CallIntent, Message
from rollyard.schemas.errors import BlobError

MIN_BYTES: Final = 2048
MAX_CACHED_BYTES: Final = 64 * 1024 * 1024
TOOLS: Final = "tools"
_SYSTEM: Final = frozenset({"system", "developer"})


class Contents:
    """Takes such parts out of records and puts them back. Without a blob store nothing is taken out."""

    def __init__(self, blobs: BlobStore | None) -> None:
        self._blobs = blobs
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._names: dict[bytes, str] = {}

    async def take_out(self, intent: CallIntent) -> CallIntent:
        """The record with names in the place of large parts. Raises BlobRefused when the store takes no more."""
        if self._blobs is None:
            return intent
        names: dict[str, str] = {}
        messages = intent.messages
        if intent.tools and len(data := msgspec.json.encode(intent.tools)) >= MIN_BYTES:
            names[TOOLS] = await self._put(data)
        for index, message in enumerate(intent.messages):
            if message.get("role") not in _SYSTEM or len(data := msgspec.json.encode(message)) < MIN_BYTES:
                continue
            names[str(index)] = await self._put(data)
            messages = [*messages[:index], {"role": message["role"]}, *messages[index + 1 :]]
        if not names:
            return intent
        return structs.replace(
            intent, messages=messages, tools=None if TOOLS in names else intent.tools, contents=names
        )

    def put_back(self, intent: CallIntent) -> CallIntent:
        """The record whole again. Raises BlobError when a part cannot be read."""
        if not intent.contents:
            return intent
        parts: dict[str, Any] = {where: msgspec.json.decode(self._get(name)) for where, name in intent.contents.items()}
        tools: list[Message] | None = parts.pop(TOOLS, intent.tools)
        messages = list(intent.messages)
        for index, message in parts.items():
            messages[int(index)] = message
        return structs.replace(intent, messages=messages, tools=tools, contents={})

    async def _put(self, data: bytes) -> str:
        assert self._blobs is not None
        name = self._names.get(data)
        if name is None:
            name = await asyncio.to_thread(self._blobs.put, data)
            self._remember(name, data)
        return name

    def _get(self, name: str) -> bytes:
        data = self._cache.get(name)
        if data is None:
            if self._blobs is None:
                raise BlobError(
                    f"a record refers to blob {name}, and there is no blob store here",
                    hint="configure [store] blobs, the folder that every role can read",
                )
            data = self._blobs.get(name)
            self._remember(name, data)
        else:
            self._cache.move_to_end(name)
        return data

    def _remember(self, name: str, data: bytes) -> None:
        if name in self._cache:
            return
        self._cache[name] = data
        self._names[data] = name
        self._cached_bytes += len(data)
        while self._cached_bytes > MAX_CACHED_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._names.pop(dropped, None)
            self._cached_bytes -= len(dropped)
