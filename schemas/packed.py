"""Packed number arrays: token ids, logprobs, masks and versions as little-endian bytes.

An agent's session holds hundreds of thousands of token ids. They stay the bytes that came from the wire until somebody
asks for numbers: slicing, comparing and joining work on the bytes. In msgpack a packed array is a `bin`, in JSON a list
of numbers. `numpy.asarray(x)` gives a read-only view without a copy.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self, overload


class Packed:
    """An immutable sequence of numbers over little-endian bytes. Subclasses fix the item type.

    Raises ValueError when `data` is not a whole number of items.
    """

    typecode: ClassVar[str] = "I"
    dtype: ClassVar[str] = "<u4"
    itemsize: ClassVar[int] = 4
    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        if len(data) % self.itemsize:
            raise ValueError(f"{type(self).__name__}: {len(data)} bytes are no multiple of {self.itemsize}")
        self.data = data

    @classmethod
    def of(cls, items: Iterable[float]) -> Self:
        """Pack numbers. Raises OverflowError or TypeError when one does not fit the item type."""
        packed: array[Any] = array(cls.typecode, items)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(packed.tobytes())

    def tolist(self) -> list[Any]:
        """The numbers as a plain list."""
        unpacked: array[Any] = array(self.typecode)
        unpacked.frombytes(self.data)
        if sys.byteorder == "big":
            unpacked.byteswap()
        return unpacked.tolist()

    def startswith(self, prefix: Packed) -> bool:
        """Whether this array begins with exactly the numbers of `prefix`."""
        return self.data.startswith(prefix.data)

    def __len__(self) -> int:
        return len(self.data) // self.itemsize

    @overload
    def __getitem__(self, key: slice) -> Self: ...
    @overload
    def __getitem__(self, key: int) -> Any: ...
    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return type(self).of(self.tolist()[key])
            return type(self)(self.data[start * self.itemsize : max(start, stop) * self.itemsize])
        index = range(len(self))[key]
        return type(self)(self.data[index * self.itemsize : (index + 1) * self.itemsize]).tolist()[0]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.data + other.data)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.data == self.data

    def __hash__(self) -> int:
        return hash((type(self), self.data))

    def __repr__(self) -> str:
        head = ", ".join(map(str, self[:6].tolist()))
        return f"{type(self).__name__}([{head}{', ...' if len(self) > 6 else ''}], n={len(self)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np  # noqa: PLC0415 - this package imports msgspec only

        view = np.frombuffer(self.data, dtype=self.dtype)
        return np.array(view, dtype=dtype, copy=True) if copy or dtype is not None else view


class TokenIds(Packed):
    """Token ids as uint32."""

    __slots__ = ()


class Logprobs(Packed):
    """Natural-log probabilities as float32."""

    typecode, dtype = "f", "<f4"
    __slots__ = ()


class LossMask(Packed):
    """One byte a token: 1 where the token was sampled and is trained, else 0."""

    typecode, dtype, itemsize = "B", "<u1", 1
    __slots__ = ()


class Versions(Packed):
    """Policy versions as int32; -1 where a token was not sampled or its version is not known."""

    typecode, dtype = "i", "<i4"
    __slots__ = ()


def to_wire(value: Any) -> Any:
    """msgspec `enc_hook` for msgpack."""
    if isinstance(value, Packed):
        return value.data
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def to_json(value: Any) -> Any:
    """msgspec `enc_hook` for JSON."""
    if isinstance(value, Packed):
        return value.tolist()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def from_wire(kind: type, value: Any) -> Any:
    """msgspec `dec_hook` for msgpack and JSON."""
    if issubclass(kind, Packed):
        if isinstance(value, bytes):
            return kind(value)
        if isinstance(value, list):
            try:
                # JSON has no NaN: a number that is not finite is written as null.
                return kind.of(math.nan if item is None else item for item in value)
            except (OverflowError, TypeError) as error:
                raise ValueError(f"{kind.__name__}: {error}") from None
        raise ValueError(f"{kind.__name__} takes bytes or a list of numbers, not {type(value).__name__}")
    raise NotImplementedError(f"cannot decode {kind.__name__}")


def json_schema(kind: type) -> dict[str, Any]:
    """msgspec `schema_hook`: packed arrays are lists of numbers in JSON."""
    if issubclass(kind, Packed):
        item = "number" if kind.typecode == "f" else "integer"
        return {"type": "array", "items": {"type": item}, "description": (kind.__doc__ or "").strip()}
    raise NotImplementedError(kind.__name__)
