"""How inside.sh is run, what a command is given there, and how its end is read."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.subjects import digest

SCRIPT: Final = Path(__file__).with_name("inside.sh")
FILE_BLOCK_BYTES: Final = 512

# Keeps the program in a file, so that lists of processes stay readable; where no file can be kept, it runs as it came.
_BOOT: Final = """
ry_file=$1 ry_text=$2
shift 2
if ! [ -r "$ry_file" ]; then
  mkdir -m 1777 -- "${1%/*}" "$1" || mkdir -p -- "$1"
  printf '%s' "$ry_text" >"$ry_file.$$" && mv -f -- "$ry_file.$$" "$ry_file"
fi 2>/dev/null
[ -r "$ry_file" ] && exec sh "$ry_file" "$@"
eval "$ry_text"
"""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SIGNALS: Final = frozenset(signal.valid_signals())
# A shell stands between us and the command: it sets the first ones itself, and refuses the others.
_SHELL_VARIABLES: Final = frozenset(
    {"IFS", "OLDPWD", "OPTIND", "PPID", "PWD", "SHLVL", "_", "ROLLYARD_PROCESS"}
    | {"BASHOPTS", "BASH_VERSINFO", "EUID", "SHELLOPTS", "UID"}
)


def inside_argv(control: str, given: Sequence[str], *, binary: bool) -> list[str]:
    """The command that runs a verb of inside.sh: `given` is the verb and its arguments."""
    text = script_text()
    file = f"{control}/inside-{digest(text, chars=8)}.sh"
    return ["sh", "-c", _BOOT, "rollyard", file, text, control, "plain" if binary else "base64", *given]


@cache
def script_text() -> str:
    """inside.sh without its comments."""
    lines = SCRIPT.read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if not line.lstrip().startswith("#"))


def variables(env: Mapping[str, str]) -> list[str]:
    """`NAME=VALUE`s that a shell can export. Raises SandboxError that names the variable."""
    for name in env:
        if not _VARIABLE.match(name):
            raise SandboxError(f"the environment variable {name!r} has no name that a shell can set")
        if name.startswith("ry_"):
            raise SandboxError(f"the environment variable {name!r} is Rollyard's own", hint="rename it")
    return [f"{name}={value}" for name, value in env.items() if name not in _SHELL_VARIABLES]


def exit_code(status: int) -> int:
    """A shell's status as Python counts it: 128 + n becomes -n."""
    return 128 - status if status - 128 in _SIGNALS else status
