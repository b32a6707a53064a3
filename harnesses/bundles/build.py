"""Building a bundle: aside, tried, and then put into its place whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from rollyard.harnesses.bundles import contents
from rollyard.harnesses.bundles.bundle import MARKER, Recipe, Record, Say, folder_of, read_record, state_of
from rollyard.schemas.errors import HarnessError

HINT: Final = "this agent does not run on this machine; see what it said"


def build(made: Recipe, say: Say, *, again: bool = False) -> Record:
    """Make the bundle of a recipe, unless it is there and not wanted `again`; two builders make it once.

    Raises HarnessError."""
    folder = folder_of(made)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f".{made.name}.lock"):
            record = read_record(folder)
            if record is not None and not again and state_of(made) == "ready":
                return record
            for left in folder.parent.glob(f".{made.name}.*.tmp"):
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{made.name}.", suffix=".tmp") as aside:
                new = Path(aside) / "bundle"
                new.mkdir()
                record = _fill(made, new, say)
                if folder.exists():
                    folder.rename(Path(aside) / "old")
                new.rename(folder)
            return record
    except OSError as error:
        raise HarnessError(
            f"the agent bundle {made.name} could not be made in {folder.parent}: {error}",
            hint="is there room on the disk? ROLLYARD_BUNDLES names another folder",
        ) from error


def _fill(made: Recipe, folder: Path, say: Say) -> Record:
    made.fill(folder, say)
    say("trying it")
    with tempfile.TemporaryDirectory() as home:
        env = {"HOME": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        contents.run((str(folder / "bin" / made.program), *made.trial), env=env, hint=HINT)
    size_bytes, files = _settle(folder)
    record = Record(name=made.name, version=made.version, digest=made.digest(), size_bytes=size_bytes, files=files)
    (folder / MARKER).write_bytes(msgspec.json.encode(record))
    (folder / MARKER).chmod(0o644)
    return record


def _settle(folder: Path) -> tuple[int, int]:
    """Let every user read it and nobody write; returns bytes and number of files."""
    size_bytes = files = 0
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if path.is_symlink():
            continue
        mode = path.stat().st_mode
        if path.is_dir():
            path.chmod(0o755)
        else:
            path.chmod(0o755 if mode & 0o100 else 0o644)
            size_bytes, files = size_bytes + path.stat().st_size, files + 1
    return size_bytes, files


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other builder of this bundle is at work."""
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), False)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
