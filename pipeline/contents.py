"""Parts of call records that are kept once, by content, in the blob store: tool definitions, system prompts, images.

Tools and system prompts recur in every session: the record holds their names (`CallIntent.contents`), and whoever reads
it gets them put back. Images stay references (pipeline/images.py), in samples too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from rollyard.pipeline import images
from rollyard.pipeline.blobs import BlobStore
from rollyard.schemas.call import CallIntent, Message
from rollyard.schemas.errors import BlobError

MIN_BYTES: Final = 2048
MAX_CACHED_BYTES: Final = 64 * 1024 * 1024
PUT_AGAIN_S: Final = 600.0
TOOLS: Final = "tools"
_SYSTEM: Final = frozenset({"system", "developer"})


class Contents:
    """Takes such parts out of records and puts them back. Without a blob store nothing is taken out."""

    def __init__(self, blobs: BlobStore | None) -> None:
        self._blobs = blobs
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._names: dict[bytes, str] = {}
        self._put_s: dict[str, float] = {}
        self._parts: dict[str, Any] = {}

    async def take_out(self, intent: CallIntent) -> CallIntent:
        """The record with names in the place of large parts. Raises BlobRefused when the store takes no more."""
        if self._blobs is None:
            return intent
        names: dict[str, str] = {}
        messages, pictures = images.take_out(intent.messages)
        for picture in pictures.values():
            await asyncio.to_thread(self._blobs.put, picture)
        if intent.tools and len(data := msgspec.json.encode(intent.tools)) >= MIN_BYTES:
            names[TOOLS] = await self._put(data)
        for index, message in enumerate(messages):
            if message.get("role") not in _SYSTEM or len(data := msgspec.json.encode(message)) < MIN_BYTES:
                continue
            names[str(index)] = await self._put(data)
            messages = [*messages[:index], {"role": message["role"]}, *messages[index + 1 :]]
        if not names and not pictures:
            return intent
        return structs.replace(
            intent, messages=messages, tools=None if TOOLS in names else intent.tools, contents=names
        )

    def put_back(self, intent: CallIntent) -> CallIntent:
        """The record whole again. Raises BlobError when a part cannot be read."""
        if not intent.contents:
            return intent
        parts: dict[str, Any] = {where: self._part(name) for where, name in intent.contents.items()}
        tools: list[Message] | None = parts.pop(TOOLS, intent.tools)
        messages = list(intent.messages)
        for index, message in parts.items():
            messages[int(index)] = message
        return structs.replace(intent, messages=messages, tools=tools, contents={})

    async def with_images(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a record as the agent sent them. Raises BlobError when an image cannot be read."""
        return images.put_back(messages, {name: await self.blob(name) for name in images.names(messages)})

    async def blob(self, reference: str) -> bytes:
        """The bytes behind `blob:<name>`, or behind the bare name. Raises BlobError."""
        name = reference.removeprefix(images.REFERENCE)
        return await asyncio.to_thread(self._store(name).get, name)

    async def _put(self, data: bytes) -> str:
        assert self._blobs is not None
        name = self._names.get(data)
        # Put again now and then: what nobody has put for long may be removed (pipeline/sweep.py).
        if name is None or time.monotonic() - self._put_s.get(name, -math.inf) > PUT_AGAIN_S:
            name = await asyncio.to_thread(self._blobs.put, data)
            self._remember(name, data)
            self._put_s[name] = time.monotonic()
        return name

    def _part(self, name: str) -> Any:
        """A part, decoded once: records share it, and nobody changes it."""
        data = self._get(name)
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = msgspec.json.decode(data)
        return part

    def _get(self, name: str) -> bytes:
        data = self._cache.get(name)
        if data is None:
            data = self._store(name).get(name)
            self._remember(name, data)
        else:
            self._cache.move_to_end(name)
        return data

    def _store(self, name: str) -> BlobStore:
        if self._blobs is None:
            raise BlobError(
                f"a record refers to blob {name}, and there is no blob store here",
                hint="configure [store] blobs, the folder that every role can read",
            )
        return self._blobs

    def _remember(self, name: str, data: bytes) -> None:
        if name in self._cache:
            return
        self._cache[name] = data
        self._names[data] = name
        self._cached_bytes += len(data)
        while self._cached_bytes > MAX_CACHED_BYTES:
            left, dropped = self._cache.popitem(last=False)
            self._names.pop(dropped, None)
            self._put_s.pop(left, None)
            self._parts.pop(left, None)
            self._cached_bytes -= len(dropped)
