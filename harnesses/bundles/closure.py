"""The shared libraries that programs need: copied beside them, with the loader, so that any image runs them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import HarnessError

OPENED_LATER: Final = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""What glibc opens by itself when it needs it; the middle ones are part of libc.so.6 since 2.34."""

_ELF: Final = b"\x7fELF"
_LINE: Final = re.compile(r"^\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x", re.MULTILINE)


@cache
def loader() -> Path:
    """This machine's loader, such as /lib64/ld-linux-x86-64.so.2. Raises HarnessError where there is no glibc."""
    found = [path for name, path in _listed(Path(sys.executable)) if name.startswith("ld-linux")]
    if not found:
        raise HarnessError(
            "agent bundles cannot be made here: this Python does not run on glibc",
            hint="make them on a machine with glibc, such as Debian or Ubuntu, and copy the folder",
        )
    return found[0]


def machine() -> str:
    """The processor as libraries name it, such as x86_64."""
    return platform.machine()


def copy_libraries(folder: Path, programs: Iterable[Path]) -> None:
    """Copy into `folder` what these programs and libraries need that lies outside of their own bundle."""
    folder.mkdir(exist_ok=True)
    bundle = folder.parent
    shutil.copy(loader(), folder / loader().name)
    for program in programs:
        for name, path in _listed(program):
            if not path.is_relative_to(bundle) and not (folder / name).exists():
                shutil.copy(path, folder / name)
    libc = next(path for name, path in _listed(Path(sys.executable)) if name == "libc.so.6")
    for name in OPENED_LATER:
        if (libc.parent / name).exists() and not (folder / name).exists():
            shutil.copy(libc.parent / name, folder / name)


def libraries_below(folder: Path) -> list[Path]:
    """Every program and shared library in a tree."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and _is_elf(path)]


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _ELF


@cache
def _listed(program: Path) -> list[tuple[str, Path]]:
    """What the loader would load for it, by the name under which it is asked for; nothing for a static program."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return [
        (match["name"] or Path(match["path"]).name, Path(match["path"]).resolve())
        if match["name"]
        else (Path(match["path"]).name, Path(match["path"]))
        for match in _LINE.finditer(done.stdout)
    ]
