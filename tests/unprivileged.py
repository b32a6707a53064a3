"""Running a program of a test as a user without any privilege, also when the tests run as root."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

UID: Final = 60_123
"""No user has it; none is needed."""

# Shows a folder below one that the user may not enter, in a mount namespace of its own.
_SHOW: Final = """
top=$1 keep=$2 aside=$3
shift 3
if [ -n "$top" ]; then
  mount --bind "$keep" "$aside" && mount -t tmpfs -o mode=755 tests "$top" && mkdir -p "$keep" || exit 99
  mount --move "$aside" "$keep" || exit 99
fi
exec "$@"
"""


def missing() -> str:
    """Why it cannot be done here; empty when it can."""
    if os.getuid() != 0:
        return ""
    for program in ("setpriv", "unshare"):
        if shutil.which(program) is None:
            return f"no {program} on this machine"
    if _closed_above(Path(__file__)):
        return f"other users may not read {Path(__file__).parent}"
    return ""


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that the user owns and can reach."""
    with tempfile.TemporaryDirectory(prefix="rollyard-user-", dir="/tmp") as made:
        if os.getuid() == 0:
            os.chown(made, UID, UID)
        yield Path(made)


def command(argv: Sequence[str], aside: Path) -> list[str]:
    """What runs `argv` as that user. `aside` is an empty folder."""
    if os.getuid() != 0:
        return list(argv)
    python = Path(sys.base_prefix)
    top = _closed_above(python / "bin")
    drop = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--inh-caps=-all", "--"]
    show = ["unshare", "-m", "--propagation", "private", "sh", "-c", _SHOW, "sh"]
    return [*show, str(top or ""), str(python), str(aside), *drop, *argv]


def _closed_above(path: Path) -> Path | None:
    """The first folder on the way to `path` that others may not enter."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None
