"""The canonical encoding of a sample, and its digest: what a commit remembers and a replay compares."""

from __future__ import annotations

from typing import Final

import msgspec

from rollyard.schemas import packed, subjects
from rollyard.schemas.sample import Sample

DIGEST_CHARS: Final = 32

_encoder = msgspec.msgpack.Encoder(enc_hook=packed.to_wire, order="deterministic")


def sample_digest(sample: Sample) -> str:
    """A digest of everything in a sample, independent of the key order in its messages, tools and metadata."""
    return subjects.digest(_encoder.encode(sample), chars=DIGEST_CHARS)
