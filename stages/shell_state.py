"""What a shell tells of itself: its directory, and its exported variables as `export -p` prints them. Pure.

The declarations are kept as the shell wrote them, for the same kind of shell to read again. Background jobs may have
written in between, so everything is matched against what shells print: what is not a declaration is never run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Self

_NAME: Final = rb"[A-Za-z_][A-Za-z0-9_]*"
_DOUBLE: Final = rb'"(?:[^"\\$`]|\\[\s\S])*"'  # bash escapes every $ and `, so nothing in it is expanded
_ANSI: Final = rb"\$'(?:[^'\\]|\\[\s\S])*'"
_SINGLE: Final = rb"""(?:'[^']*'|"'+"|\\')+"""
_DECLARATION: Final = re.compile(
    rb"^(?:declare -[A-Za-z]*x[A-Za-z]* (?P<bash>%(name)s)(?:=(?:%(double)s|%(ansi)s|(?P<array>\([^\n]*\))))?"
    rb"|export (?P<sh>%(name)s)(?:=(?:%(single)s|%(double)s|%(ansi)s))?)\n"
    % {b"name": _NAME, b"double": _DOUBLE, b"single": _SINGLE, b"ansi": _ANSI},
    re.MULTILINE,
)
# What each shell sets itself, or lets nobody set; and our own.
_ITS_OWN: Final = frozenset(
    b"_ PWD OLDPWD SHLVL PPID UID EUID BASHOPTS SHELLOPTS BASH_VERSINFO ROLLYARD_PROCESS".split()
)


@dataclass(frozen=True, slots=True)
class ShellState:
    """`directory` is as the shell names it, empty when not known; `declarations` are by name, each a line or more."""

    directory: bytes = b""
    declarations: dict[bytes, bytes] = field(default_factory=dict)
    told: bytes = b""  # what it was read from

    @classmethod
    def read(cls, block: bytes) -> tuple[Self | None, bytes]:
        """What `DIRECTORY 00 DECLARATIONS` tells, None when it is not whole; and what does not belong to it."""
        state, noise = cls._read(block)
        if noise and b"\r\n" in block:  # a terminal that the command left with a program's settings
            state, noise = cls._read(block.replace(b"\r\n", b"\n"))
        return state, noise

    @classmethod
    def _read(cls, block: bytes) -> tuple[Self | None, bytes]:
        directory, found, text = block.partition(b"\0")
        if not found or (directory and not directory.startswith(b"/")):
            return None, block
        declarations: dict[bytes, bytes] = {}

        def take(match: re.Match[bytes]) -> bytes:
            name = match["bash"] or match["sh"]
            if name not in _ITS_OWN and not match["array"]:
                declarations[name] = match[0]
            return b""

        noise = _DECLARATION.sub(take, text)
        if noise.endswith(b"\0"):  # the shell could not write them all
            return None, noise[:-1]
        return (None if noise else cls(directory, declarations, block)), noise

    def gone_since(self, earlier: ShellState) -> list[bytes]:
        """Names that were exported then and are not now."""
        return sorted(earlier.declarations.keys() - self.declarations.keys())
