"""Which worker processes of this machine live: each holds a lock on a file that the kernel takes back when it dies."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError

FOLDER: Final = "owners"
KEPT_S: Final = 7 * 86_400.0
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}\Z")


class Owners:
    """The workers that share the folder `root`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Show that `name` lives, within the block and no longer than this process. Raises SandboxError."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tidy()
            file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SandboxError(
                f"the folder {self._folder} cannot be written: {error}", hint="see [worker] sandboxes"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(file)

    def alive(self, name: str) -> bool | None:
        """Whether the worker `name` lives; None: it is not known here, perhaps one of another machine."""
        if not _NAME.match(name):
            return None
        try:
            file = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def _tidy(self) -> None:
        for path in self._folder.iterdir():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > KEPT_S and self.alive(path.name) is False:
                    path.unlink()
