"""What is written on a sandbox of E2B, and how a reference names it. Pure.

A reference holds all that another process needs; the same stands in the sandbox's metadata, so that a listing gives the
very references that `create` gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Self

import msgspec
from msgspec import Struct

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import Labels

INSTALLATION_KEY: Final = "rollyard"
LABELS_KEY: Final = "rollyard-labels"
PLACING_KEY: Final = "rollyard-placing"
HOME: Final = "/home/user"
MIN_TIMEOUT_S: Final = 1


class Placing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one sandbox was made with, as far as whoever opens it must know it."""

    deadline_ms: int  # Unix ms; it ends then, whoever renews it
    workdir: str = ""  # empty: the backend's
    user: str = ""  # empty: the template's
    max_file_bytes: int = 0  # 0: the backend's
    gateway: bool = True  # whether the gateway can be reached from inside

    def home(self) -> str:
        """The home of the user whom the sandbox runs agents as."""
        if self.user in ("", "user"):
            return HOME
        return "/root" if self.user == "root" else f"/home/{self.user}"


class Handle(Placing, frozen=True, kw_only=True, omit_defaults=True):
    """The handle of a reference, as JSON."""

    id: str

    @classmethod
    def of(cls, sandbox_id: str, placing: Placing) -> Self:
        """The handle of a sandbox."""
        return cls(id=sandbox_id, **{name: getattr(placing, name) for name in Placing.__struct_fields__})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises SandboxError for what is no handle."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise SandboxError(
                f"{text!r} is no sandbox of E2B: {error}", hint="take the reference that `create` gave"
            ) from error

    def text(self) -> str:
        """As it stands in a reference."""
        return msgspec.json.encode(self).decode()


def metadata_of(installation: str, labels: Labels, placing: Placing) -> dict[str, str]:
    """What a sandbox carries from its first moment."""
    return {
        INSTALLATION_KEY: installation,
        LABELS_KEY: msgspec.json.encode(labels).decode(),
        PLACING_KEY: msgspec.json.encode(placing).decode(),
    }


def read_metadata(metadata: Mapping[str, str]) -> tuple[Labels, Placing]:
    """What a sandbox carries. What cannot be read is replaced by what makes it an orphan past its time."""
    try:
        labels = msgspec.json.decode(metadata.get(LABELS_KEY, ""), type=Labels)
        placing = msgspec.json.decode(metadata.get(PLACING_KEY, ""), type=Placing)
    except msgspec.MsgspecError:
        return Labels(run="", rollout_id="unknown", attempt=0, owner="", created_ms=0), Placing(deadline_ms=0)
    return labels, placing


def timeout_of(placing: Placing, timeout_s: float, now_ms: int) -> int:
    """Whole seconds that E2B is to let a sandbox live from now: `timeout_s`, but not past its deadline by more than the
    second that E2B counts in."""
    left_s = (placing.deadline_ms - now_ms) / 1000
    return max(MIN_TIMEOUT_S, math.ceil(min(timeout_s, left_s)))


def is_due(placing: Placing, timeout_s: float, now_ms: int, end_ms: int) -> bool:
    """Whether a sandbox that would end at `end_ms` is to be extended: half its time is over, its deadline is later."""
    left_ms = end_ms - now_ms
    return left_ms < timeout_s * 500 and placing.deadline_ms > max(end_ms, now_ms)
