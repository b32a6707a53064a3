"""A shell in tmux, as agents use it: keys are sent, and the screen is captured until the end mark shows."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager


class Tmux:
    """One session of a tmux server of its own."""

    def __init__(self) -> None:
        self.socket = f"bench-{uuid.uuid4().hex}"
        self.count = 0

    def ask(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-L", self.socket, *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def run(self, command: str) -> str:
        """What the command printed."""
        self.count += 1
        mark = f"end-{self.count}-of-it"
        # The quotes keep the typed line from looking like the mark.
        self.ask("clear-history")
        self.ask("send-keys", "-l", f"clear; {command}; echo end-{self.count}-of''-it\n")
        while mark not in (screen := self.ask("capture-pane", "-p", "-S", "-")):
            pass
        return screen


@contextmanager
def tmux() -> Iterator[Tmux]:
    """A session that keeps the lines of 1 MB."""
    server = Tmux()
    shell = "env PS1= bash --norc --noprofile"
    # The limit holds for windows that are made after it was set.
    server.ask("-f", "/dev/null", "new-session", "-d", "-x", "160", "-y", "50", "sleep 100000")
    try:
        server.ask("set-option", "-g", "history-limit", "400000")
        server.ask("new-window", shell)
        yield server
    finally:
        server.ask("kill-server")
