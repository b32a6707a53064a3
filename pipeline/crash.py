"""A test hook: kill this process at a named step, once, to show that any death is survived.

`ROLLYARD_TEST_KILL=<step>@<file>` kills the process with SIGKILL when it reaches `<step>` and `<file>` does not exist
yet; the file is created first, so that the process which is started next lives on. Unset, the hook does nothing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

VARIABLE: Final = "ROLLYARD_TEST_KILL"
_STEP, _, _MARK = os.environ.get(VARIABLE, "").partition("@")


def checkpoint(step: str) -> None:
    """Die here if the hook says so."""
    if step != _STEP:
        return
    try:
        Path(_MARK).open("x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
