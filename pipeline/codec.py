"""Records as bytes: msgpack, zstd above 4 KB; JSON is read wherever a user may publish.

The first byte tells which: `(` begins a zstd frame, `{` JSON, and neither begins a msgpack map. `Content-Type` says the
same in words for readers in other languages; see `content_type`.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec
import zstandard

from rollyard.schemas.errors import DecodeError, TooNew
from rollyard.schemas.packed import from_wire, to_json, to_wire
from rollyard.schemas.task import SCHEMA_VERSION

T = TypeVar("T")

COMPRESS_ABOVE_BYTES: Final = 4096
MAX_DECODED_BYTES: Final = 1 << 30
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=to_wire)
_json: Final = msgspec.json.Encoder(enc_hook=to_json)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_local = threading.local()


class _Versioned(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def encode(record: Any) -> bytes:
    """A record as msgpack, as a zstd frame when that is over 4 KB."""
    data = _encoder.encode(record)
    if len(data) <= COMPRESS_ABOVE_BYTES:
        return data
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=1)
    packed: bytes = _local.compressor.compress(data)
    return packed


def encode_json(record: Any) -> bytes:
    """A record as JSON; packed arrays become lists of numbers."""
    return _json.encode(record)


def content_type(data: bytes) -> str:
    """The media type of an encoded record."""
    if data.startswith(_ZSTD):
        return "application/msgpack+zstd"
    return "application/json" if data[:1] == b"{" else "application/msgpack"


def unpacked(data: bytes) -> bytes:
    """The msgpack or JSON of an encoded record. Raises DecodeError for a zstd frame that is broken."""
    try:
        return _plain(data)
    except (zstandard.ZstdError, ValueError) as error:
        raise DecodeError(f"not a record: {error}") from error


def decode(data: bytes, kind: type[T] | Any) -> T:
    """Read a record of type `kind` (a struct or a union of tagged structs).

    Raises DecodeError when the bytes are no such record, or one of a newer schema version.
    """
    try:
        plain = _plain(data)
        if plain[:1] == b"{":
            record = msgspec.json.decode(plain, type=kind, dec_hook=from_wire)
        else:
            record = _decoder(kind).decode(plain)
    except (msgspec.MsgspecError, zstandard.ZstdError, ValueError, UnicodeDecodeError) as error:
        raise _explain(data, kind, error) from None
    version = getattr(record, "schema_version", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise _too_new(version)
    return record


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=from_wire)
    return decoder


def _plain(data: bytes) -> bytes:
    if not data.startswith(_ZSTD):
        return data
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    # A frame that tells its size is unpacked to that size, whatever the limit.
    if zstandard.frame_content_size(data) > MAX_DECODED_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_DECODED_BYTES:,} bytes")
    plain: bytes = _local.decompressor.decompress(data, max_output_size=MAX_DECODED_BYTES)
    return plain


def _too_new(version: int) -> TooNew:
    return TooNew(
        f"a record of schema version {version} cannot be read by this release, which knows {SCHEMA_VERSION}",
        hint="upgrade Rollyard on this machine",
    )


def _explain(data: bytes, kind: Any, error: Exception) -> DecodeError:
    try:
        plain = _plain(data)
        decode_version = msgspec.json.decode if plain[:1] == b"{" else msgspec.msgpack.decode
        version = decode_version(plain, type=_Versioned).schema_version
    except (msgspec.MsgspecError, zstandard.ZstdError, ValueError):
        version = SCHEMA_VERSION
    if version > SCHEMA_VERSION:
        return _too_new(version)
    return DecodeError(f"not a {getattr(kind, '__name__', kind)}: {error}")
