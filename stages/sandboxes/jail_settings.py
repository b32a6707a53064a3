"""Settings of the backend `bubblewrap`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from rollyard.stages.sandboxes.settings import BackendSettings

DEFAULT_UID: Final = 64_042
HOST: Final = (
    "/usr",
    "/etc/alternatives",
    "/etc/ssl",
    "/etc/ca-certificates",
    "/etc/pki",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
)


class BubblewrapSettings(BackendSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the backend `bubblewrap`."""

    images: Annotated[str, Meta(description="folder of the image store; empty: `images` beside `root`")] = ""
    uid: Annotated[int, Meta(ge=1, description="user and group id that sandboxes of a root worker run as")] = (
        DEFAULT_UID
    )
    host: Annotated[
        tuple[str, ...], Meta(description="folders of this machine that a sandbox without image sees, read-only")
    ] = HOST
    workdir: Annotated[str, Meta(description="working directory where neither task nor image says one")] = "/work"
    home: Annotated[str, Meta(description="home of the agent")] = "/root"
    memory_bytes: Annotated[int, Meta(ge=0, description="memory of a sandbox without limit; 0: none")] = 4 << 30
    disk_bytes: Annotated[int, Meta(ge=1 << 20, description="bytes that a sandbox may write, held in memory")] = 2 << 30
    max_processes: Annotated[int, Meta(ge=0, description="processes and threads of a sandbox; 0: no limit")] = 1024
    max_file_bytes: Annotated[int, Meta(ge=512, description="bytes that one file of an agent may have")] = 1 << 30
    nested_namespaces: Annotated[bool, Meta(description="let agents make user namespaces of their own")] = False
    watch_s: Annotated[float, Meta(gt=0, description="seconds between two looks at the memory of sandboxes")] = 1.0

    def drop_to(self) -> int | None:
        """Whom this worker becomes for what runs inside; None: it is an ordinary user, and stays it.

        Root of a user namespace, as in a rootless container, is an ordinary user outside.
        """
        if os.getuid() != 0:
            return None
        with suppress(OSError, ValueError, IndexError):
            inside, outside, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[0].split())
            if (inside, outside) != (0, 0) or count <= self.uid:
                return None
        return self.uid
