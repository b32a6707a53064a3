"""What recipes share: wrapper scripts, leaving out what no agent needs, programs that are run while building."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rollyard.harnesses.bundles import closure
from rollyard.schemas.errors import HarnessError

HERE: Final = Path(__file__).parent
MAX_TOLD_CHARS: Final = 1500


def wrapper(kind: str, program: str, main: str) -> str:
    """The text of a script in bin/; `kind` is a file NAME.sh here."""
    values = {"PROGRAM": program, "MAIN": main, "LOADER": closure.loader().name, "MACHINE": closure.machine()}
    text = (HERE / f"{kind}.sh").read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def program(name: str) -> Path:
    """A program of this machine. Raises HarnessError."""
    found = shutil.which(name)
    if found is None:
        raise HarnessError(f"there is no {name} on this machine, which the bundle is to hold", hint=f"install {name}")
    return Path(found).resolve()


def write_program(folder: Path, name: str, text: str) -> None:
    """An executable script bin/`name`."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def leave_out(folder: Path, patterns: Iterable[str]) -> None:
    """Remove what matches the patterns of Path.glob."""
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def run(argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, hint: str) -> str:
    """Run a program; returns its standard output. Raises HarnessError with the end of what it said."""
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise HarnessError(f"{argv[0]} cannot be run: {error}", hint=hint) from error
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip()[-MAX_TOLD_CHARS:]
        raise HarnessError(f"{' '.join(argv[:3])} ended with exit status {done.returncode}: {told}", hint=hint)
    return done.stdout
