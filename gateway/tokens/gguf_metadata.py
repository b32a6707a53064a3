"""The metadata of a GGUF file.

Reads the key-value header only. The `gguf` package makes a numpy array of each of 100,000 vocabulary strings, which
takes seconds at every start of a process; this takes a few hundredths of one.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from rollyard.schemas.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class _Cursor:
    """A place in the file that moves on with each value read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return values

    def string(self) -> str:
        (size,) = self.scalars("Q")
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise ValueError("a string runs over the end of the file")
        return self.data[start : self.offset].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            ((item,), (count,)) = self.scalars("I"), self.scalars("Q")
            if item in _SCALARS:
                return list(self.scalars(_SCALARS[item], count))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not known")
        return self.scalars(_SCALARS[kind])[0]


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of a little-endian GGUF file of version 2 or 3. Raises ConfigError for any other file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[:4] != b"GGUF":
                raise ValueError("it does not start with GGUF")
            cursor.offset = 4
            (version,) = cursor.scalars("I")
            if version not in _VERSIONS:
                raise ValueError(f"GGUF version {version} is not one of {_VERSIONS}")
            _tensors, pairs = cursor.scalars("Q", 2)
            return {cursor.string(): cursor.value(cursor.scalars("I")[0]) for _ in range(pairs)}
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"cannot read the GGUF file {path}: {error}", hint="give a complete GGUF model") from error
