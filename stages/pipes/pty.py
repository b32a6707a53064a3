"""A pipe to a program of this machine through a pseudo-terminal, for those that want a terminal's size and colours."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

from rollyard.schemas.errors import SandboxError
from rollyard.stages.pipes.subprocess import ChildPipe, Kill, spawn

ROWS: Final = 24
COLUMNS: Final = 80
_TAKE_TERMINAL: Final = 'exec <"$0" >"$0" 2>&1; exec "$@"'


class PtyPipe(ChildPipe):
    """One pseudo-terminal for all three streams. It changes nothing on its way: no echo, no `\\r\\n`, no signals."""

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        inner: Sequence[str] = (),
        cwd: str | None = None,
        env: Mapping[str, str],
        kill: Kill | None = None,
    ) -> Self:
        """Start `argv` as in `SubprocessPipe.spawn`, with a terminal of its own. Raises SandboxError."""
        try:
            master, slave = pty.openpty()
        except OSError as error:
            raise SandboxError(f"there is no pseudo-terminal for a shell: {error}") from error
        try:
            make_raw(slave)
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            # The leader of a session without terminal takes the one that it opens.
            child = spawn(("sh", "-c", _TAKE_TERMINAL, os.ttyname(slave), *argv), cwd, env, slave)
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        return cls(child, (master, master), inner or argv, kill)

    async def write(self, data: bytes) -> None:
        """The terminal is set right before, since programs leave it as they like."""
        with suppress(OSError, termios.error):
            make_raw(self._write_fd)
        await super().write(data)


def make_raw(fd: int) -> None:
    """Let a terminal pass every byte as it is."""
    attributes = termios.tcgetattr(fd)
    input_modes, output_modes, control, local, in_speed, out_speed, characters = attributes
    input_modes = 0
    output_modes &= ~termios.OPOST
    control |= termios.CS8
    local &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    termios.tcsetattr(fd, termios.TCSANOW, [input_modes, output_modes, control, local, in_speed, out_speed, characters])
