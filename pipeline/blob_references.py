"""Which blobs a stored record refers to. Whoever archives an event or removes blobs must find every one.

A record names blobs in four ways: its message is a pointer to one (the header `Rollyard-Blob`), `CallIntent.contents`
names parts of it, `AgentResult.artifacts` names kept files, and images in its messages are `blob:<name>`. A part may
hold images in turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.codec import decode, unpacked
from rollyard.pipeline.jetstream import Stored
from rollyard.schemas.errors import DecodeError, TooNew
from rollyard.schemas.task import SCHEMA_VERSION

_IMAGE: Final = re.compile(rb"blob:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Named:
    """Blobs that records name beside their bodies. What looks like an image may be mere text, and not exist."""

    parts: set[str] = field(default_factory=set)
    images: set[str] = field(default_factory=set)


class _Call(msgspec.Struct):
    """What of a call's event names its parts."""

    contents: dict[str, str] = {}
    schema_version: int = SCHEMA_VERSION


class _Artifact(msgspec.Struct):
    blob: str = ""


class _Result(msgspec.Struct):
    artifacts: tuple[_Artifact, ...] = ()


class _Life(msgspec.Struct):
    """What of a rollout's event names the files that were kept."""

    result: _Result | None = None
    schema_version: int = SCHEMA_VERSION


class References:
    """Finds the blobs that records name. A part is read from `blobs`, once, for the images in it."""

    def __init__(self, blobs: BlobStore | None) -> None:
        self._blobs = blobs
        self._within: dict[str, frozenset[str]] = {}

    def of(self, stored: Stored) -> Named:
        """The blobs that a message names. Raises TooNew for an event of a newer release, BlobError for a lost part."""
        try:
            plain = unpacked(stored.data)
        except DecodeError:
            return Named()
        named = Named(images=images_in(plain))
        if stored.subject.startswith("log.") and stored.subject.endswith(".call"):
            named.parts.update(_parts(plain))
            named.images.update(*map(self._images_within, named.parts))
        elif stored.subject.startswith("log.") and stored.subject.endswith(".life"):
            named.parts.update(_artifacts(plain))
        return named

    def _images_within(self, part: str) -> frozenset[str]:
        known = self._within.get(part)
        if known is None:
            held = images_in(self._blobs.get(part)) if self._blobs is not None else ()
            known = self._within[part] = frozenset(held)
        return known


def images_in(data: bytes | memoryview) -> set[str]:
    """The images that an unpacked record or a text refers to."""
    return {found.group(1).decode() for found in _IMAGE.finditer(data)}


def _artifacts(plain: bytes) -> set[str]:
    try:
        life: _Life = decode(plain, _Life)
    except TooNew:
        raise
    except DecodeError:
        return set()
    return {artifact.blob for artifact in life.result.artifacts} if life.result is not None else set()


def _parts(plain: bytes) -> set[str]:
    try:
        return set(decode(plain, _Call).contents.values())
    except TooNew:
        raise
    except DecodeError:
        # Nobody can read such a record, and so nobody what it names.
        return set()
