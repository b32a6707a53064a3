"""Images and files in messages: as the data URLs that agents send, or as references to their bytes in the blob store.

A reference is `{"url": "blob:<name>", "media_type": "image/png"}` where `{"url": "data:image/png;base64,..."}` was; the
name is the SHA-256 of the bytes. Only what can be rebuilt to the letter is taken out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rollyard.schemas.call import Message

REFERENCE: Final = "blob:"
MIN_CHARS: Final = 1024
MAX_CACHED_CHARS: Final = 32 * 1024 * 1024

_Holder = dict[str, Any]
_MEDIA_TYPE: Final = "media_type"
_HOLDERS: Final = (("image_url", "url"), ("file", "file_data"))
"""Keys of a part that may hold a data URL, and the key inside them that it stands under."""


def take_out(messages: Sequence[Message]) -> tuple[list[Message], dict[str, bytes]]:
    """The messages with a reference in the place of each large data URL, and the bytes by their name."""
    taken: dict[str, bytes] = {}

    def change(holder: _Holder, key: str) -> _Holder:
        found = _payload(holder, key)
        if found is None or len(found[1]) < MIN_CHARS or (name := _cache.of(found[1])) is None:
            return holder
        if name not in taken:
            taken[name] = binascii.a2b_base64(found[1])
        return {**holder, key: REFERENCE + name, _MEDIA_TYPE: found[0]}

    return [_changed(message, change) for message in messages], taken


def put_back(messages: Sequence[Message], data: Mapping[str, bytes]) -> list[Message]:
    """The messages with data URLs again, from the bytes by name; a reference without its bytes stays."""

    def change(holder: _Holder, key: str) -> _Holder:
        name = _referred(holder, key)
        if name is None or name not in data:
            return holder
        text = base64.b64encode(data[name]).decode()
        if key == "data":
            return {**holder, key: text}
        return {**_without_type(holder), key: f"data:{holder[_MEDIA_TYPE]};base64,{text}"}

    return [_changed(message, change) for message in messages]


def names(messages: Iterable[Message]) -> set[str]:
    """The blobs that these messages refer to."""
    found: set[str] = set()

    def look(holder: _Holder, key: str) -> _Holder:
        if (name := _referred(holder, key)) is not None:
            found.add(name)
        return holder

    for message in messages:
        _changed(message, look)
    return found


def by_content(message: Message) -> Message:
    """The message with the bare name of each image: the same for a data URL and for a reference to its bytes."""
    return _changed(message, _named)


def _named(holder: _Holder, key: str) -> _Holder:
    name = _referred(holder, key)
    if name is None:
        found = _payload(holder, key)
        name = _cache.of(found[1]) if found is not None else None
    return holder if name is None else {**_without_type(holder), key: REFERENCE + name}


def _changed(message: Message, change: Callable[[_Holder, str], _Holder]) -> Message:
    """The message with every holder of an image changed; the same object when nothing is."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_changed_part(part, change) if isinstance(part, dict) else part for part in content]
    return message if all(map(operator.is_, parts, content)) else {**message, "content": parts}


def _changed_part(part: Message, change: Callable[[_Holder, str], _Holder]) -> Message:
    for name, key in _HOLDERS:
        holder = part.get(name)
        if isinstance(holder, dict) and (changed := change(holder, key)) is not holder:
            part = {**part, name: changed}
    # The Messages adapter keeps a block whole that has more to it than a part can hold.
    block = part.get("_block")
    if isinstance(block, dict) and isinstance(source := block.get("source"), dict):
        changed = change(source, "data")
        part = part if changed is source else {**part, "_block": {**block, "source": changed}}
    return part


def _payload(holder: _Holder, key: str) -> tuple[str, str] | None:
    """Media type and base64 of what a holder holds; None: no data."""
    value, media_type = holder.get(key), holder.get(_MEDIA_TYPE)
    if not isinstance(value, str):
        return None
    if key == "data":
        return (media_type, value) if holder.get("type") == "base64" and isinstance(media_type, str) else None
    if media_type is not None or not value.startswith("data:"):
        return None
    head, found, text = value.removeprefix("data:").partition(";base64,")
    return (head, text) if found else None


def _referred(holder: _Holder, key: str) -> str | None:
    value = holder.get(key)
    if isinstance(value, str) and value.startswith(REFERENCE) and isinstance(holder.get(_MEDIA_TYPE), str):
        return value.removeprefix(REFERENCE)
    return None


def _without_type(holder: _Holder) -> _Holder:
    return {key: value for key, value in holder.items() if key != _MEDIA_TYPE}


class _Names:
    """Names of base64 texts. An agent sends its images again with every turn, and decoding them is what costs."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._known: OrderedDict[str, str | None] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def of(self, text: str) -> str | None:
        """The name of the bytes; None: it is not the base64 that encoding them gives."""
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
                return self._known[text]
        name = _name_of(text)
        with self._lock:
            if text not in self._known:
                self._known[text] = name
                self._chars += len(text)
            while self._chars > self._max_chars:
                dropped, _ = self._known.popitem(last=False)
                self._chars -= len(dropped)
        return name


_cache: Final = _Names(MAX_CACHED_CHARS)


def _name_of(text: str) -> str | None:
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
        # Strict mode passes over bits at the end that stand for nothing.
        if base64.b64encode(binascii.a2b_base64(text[-4:])).decode() != text[-4:]:
            return None
    except ValueError:
        return None
    return hashlib.sha256(data).hexdigest()
