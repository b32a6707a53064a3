"""How a container says whose sandbox it is. Pure.

Labels are given at creation and stay. A container that was kept warm is claimed by giving it another name, so the name
is the truth where it says something:

    rollyard-ROLLOUT.ATTEMPT-NONCE                  as its labels say
    rollyard-warm-NONCE                             kept warm, not yet anybody's
    rollyard-ROLLOUT.ATTEMPT-NONCE.LABELS           kept warm once; LABELS are base64 of JSON
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from rollyard.stages.sandbox import Labels

PREFIX: Final = "dev.rollyard."
INSTALLATION: Final = PREFIX + "installation"
MAX_FILE_BYTES: Final = 256 << 20
_NAME: Final = re.compile(
    r"rollyard-(?:warm|(?P<rollout>[A-Za-z0-9_-]+)\.(?P<attempt>\d+))-(?P<nonce>[0-9a-f]{16})(?:\.(?P<labels>[\w-]+))?\Z"
)
_ROLLOUT: Final = re.compile(r"[A-Za-z0-9_-]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a sandbox is made with and whoever opens it must know."""

    nonce: str
    workdir: str
    user: str
    gateway: bool = False
    read_only: bool = False
    max_file_bytes: int = MAX_FILE_BYTES


def is_rollout_id(text: str) -> bool:
    """Whether a container's name can hold it."""
    return _ROLLOUT.match(text) is not None


def name_of(labels: Labels, nonce: str, *, claimed: bool = False) -> str:
    """The name of a container."""
    if labels.role == "warm":
        return f"rollyard-warm-{nonce}"
    name = f"rollyard-{labels.rollout_id}.{labels.attempt}-{nonce}"
    if not claimed:
        return name
    return f"{name}.{base64.urlsafe_b64encode(msgspec.json.encode(labels)).decode().rstrip('=')}"


def docker_labels(labels: Labels, facts: Facts, *, installation: str, deadline_ms: int) -> dict[str, str]:
    """The labels of a container, readable for people with `docker ps`."""
    texts = {name: str(getattr(labels, name)) for name in labels.__struct_fields__}
    texts |= {name: str(getattr(facts, name)) for name in ("nonce", "workdir", "user", "max_file_bytes")}
    texts |= {"gateway": "yes" if facts.gateway else "no", "read_only": "yes" if facts.read_only else "no"}
    return {INSTALLATION: installation, PREFIX + "deadline_ms": str(deadline_ms)} | {
        PREFIX + name: text for name, text in texts.items()
    }


def owned(names: list[str], labels: Mapping[str, str]) -> Labels | None:
    """Whose a container is, by its names (as the engine lists them) and its labels; None: none of ours."""
    for name in names:
        if match := _NAME.match(name.removeprefix("/")):
            return _claimed(match["labels"]) or _labelled(labels, match["rollout"] or "", int(match["attempt"] or 0))
    return None


def facts_of(labels: Mapping[str, str]) -> Facts | None:
    """What a container was made with; None: it is no sandbox."""
    if INSTALLATION not in labels:
        return None
    text = {name.removeprefix(PREFIX): value for name, value in labels.items() if name.startswith(PREFIX)}
    return Facts(
        nonce=text.get("nonce", ""),
        workdir=text.get("workdir", "/"),
        user=text.get("user", ""),
        gateway=text.get("gateway") == "yes",
        read_only=text.get("read_only") == "yes",
        max_file_bytes=int(text.get("max_file_bytes", MAX_FILE_BYTES)),
    )


def _claimed(text: str | None) -> Labels | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=Labels)
    except (binascii.Error, msgspec.MsgspecError):
        return None


def _labelled(labels: Mapping[str, str], rollout_id: str, attempt: int) -> Labels:
    text = {name.removeprefix(PREFIX): value for name, value in labels.items() if name.startswith(PREFIX)}
    try:
        return msgspec.convert(text, Labels, strict=False)
    except msgspec.ValidationError:
        return Labels(run="", rollout_id=rollout_id, attempt=attempt, owner="", created_ms=0)
