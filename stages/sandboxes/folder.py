"""Sandboxes that are folders of this machine: how they are named, made, listed and found again.

<root>/lease                              renewed by workers; shims end what they own when it is not
<root>/<rollout>.<attempt>.<nonce>/       one sandbox
    labels.json  control/<process>/       see shim.sh; and what is the backend's own
<root>/<rollout>.<attempt>.<nonce>.gone/  the same, being removed
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.subjects import digest
from rollyard.stages.sandbox import Labels

CONTROL: Final = "control"
_FOLDER: Final = re.compile(r"(?P<rollout>[A-Za-z0-9_-]+)\.(?P<attempt>\d+)\.(?P<nonce>[0-9a-f]{16})\Z")
_GONE: Final = ".gone"


@dataclass(frozen=True, slots=True)
class SandboxRoot:
    """The folder of all sandboxes of one backend on this machine."""

    backend: str
    place: str
    folder: Path

    @property
    def lease(self) -> Path:
        """The file that workers touch."""
        return self.folder / "lease"

    def prepare(self, *, open_to_all: bool = False) -> None:
        """Make the folder; with `open_to_all` others can get through it, and list nothing. Raises SandboxError."""
        try:
            self.folder.mkdir(mode=0o711 if open_to_all else 0o700, parents=True, exist_ok=True)
            self.lease.touch()
        except OSError as error:
            raise SandboxError(
                f"the folder of {self.backend} sandboxes cannot be used: {error}",
                hint="set [worker] sandboxes to a writable one",
            ) from error

    def renew(self) -> None:
        """Touch the lease, or make it anew. Raises SandboxError."""
        try:
            self.lease.touch()
        except OSError as error:
            raise SandboxError(f"the lease of the {self.backend} sandboxes cannot be renewed: {error}") from error

    def make(self, labels: Labels, parts: Sequence[str], *, open_to_all: bool = False) -> Path:
        """The folder of a new sandbox, with its labels and these folders in it. With `open_to_all` others can get
        through it, but not to its processes. Raises SandboxError."""
        name = f"{labels.rollout_id}.{labels.attempt}.{secrets.token_hex(8)}"
        if not _FOLDER.match(name):
            raise SandboxError(f"{labels.rollout_id!r} is no rollout id", hint="use Rollout.of")
        folder = self.folder / name
        try:
            folder.mkdir(mode=0o711 if open_to_all else 0o700)
            (folder / "labels.json").write_bytes(msgspec.json.encode(labels))
            (folder / CONTROL).mkdir(mode=0o700)
            for part in parts:
                (folder / part).mkdir(mode=0o755)
        except OSError as error:
            raise SandboxError(
                f"the sandbox {folder} cannot be made: {error}", hint="is there room on the disk? see `df` and `df -i`"
            ) from error
        return folder

    def ref(self, folder: Path) -> SandboxRef:
        """How a sandbox is named elsewhere."""
        return SandboxRef(backend=self.backend, place=self.place, handle=str(folder))

    def folder_of(self, ref: SandboxRef) -> Path:
        """The folder that a reference names, also one under another root. Raises SandboxError."""
        folder = Path(ref.handle)
        if ref.backend != self.backend or ref.place != self.place:
            raise SandboxError(
                f"the sandbox {ref.handle} is at {ref.place}, this worker at {self.place}",
                hint="a rollout whose place is gone moves to a new attempt",
            )
        if not folder.is_absolute() or not _FOLDER.match(folder.name):
            raise SandboxError(
                f"{ref.handle!r} is no {self.backend} sandbox", hint="take the reference that `create` gave"
            )
        return folder

    def owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every sandbox, half-made and half-removed ones too. Raises SandboxError."""
        owned = {}
        try:
            entries = list(self.folder.iterdir())
        except OSError as error:
            raise SandboxError(f"the {self.backend} sandboxes cannot be listed: {error}") from error
        for entry in entries:
            name = entry.name.removesuffix(_GONE)
            if match := _FOLDER.match(name):
                ref = self.ref(self.folder / name)
                owned[name] = (ref, _labels(entry, match["rollout"], int(match["attempt"])))
        return list(owned.values())


def nonce_of(folder: Path) -> str:
    """What no other sandbox has: it begins the marks of its processes."""
    return folder.name.rpartition(".")[2]


def put_aside(folder: Path) -> Path | None:
    """Rename a sandbox's folder, so that nothing can be started in it any more; None: it is gone.

    Raises SandboxError.
    """
    gone = folder.with_name(folder.name + _GONE)
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return gone if gone.exists() else None
    except OSError as error:
        raise SandboxError(f"the sandbox {folder} cannot be removed: {error}") from error
    return gone


def this_machine(backend: str) -> str:
    """The place of sandboxes that are reached from this boot of this machine or container, as this user."""
    return f"{backend}-" + digest(boot_id(), socket.gethostname(), str(os.getuid()), chars=16)


def boot_id() -> str:
    """What tells this boot of the machine from others: Linux's boot id, elsewhere the boot time (macOS: not tried)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        sysctl = subprocess.run(["sysctl", "-n", "kern.boottime"], capture_output=True, check=False)
        return digest(sysctl.stdout, sys.platform, chars=32)


def _labels(folder: Path, rollout_id: str, attempt: int) -> Labels:
    """The labels of a sandbox; made from its name when it died before they were written."""
    try:
        return msgspec.json.decode((folder / "labels.json").read_bytes(), type=Labels)
    except (OSError, msgspec.MsgspecError):
        try:
            created_s = folder.stat().st_mtime
        except OSError:
            created_s = time.time()
        return Labels(run="", rollout_id=rollout_id, attempt=attempt, owner="", created_ms=int(created_s * 1000))
