"""Harness `bash`: the model works in a shell, one command a turn."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from rollyard.harnesses.program import PATIENCE, PATIENCE_S, ProgramHarness

SYSTEM: Final = "Answer with one shell command, nothing else. You see its output. When the task is done, say done."
EXAMPLES: Final = (
    ("Make an empty file called b.txt", "touch b.txt", "(exit status 0)", "done"),
    ("Show the date", "date", "Mon Mar  3 10:00:00 UTC 2025", "done"),
)


class BashArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `bash`."""

    system: Annotated[str, Meta(description="system message; empty: none")] = SYSTEM
    examples: Annotated[
        tuple[tuple[str, ...], ...], Meta(description="conversations: user, assistant, user, ..., assistant")
    ] = EXAMPLES
    stream: Annotated[bool, Meta(description="ask for streams")] = False
    patience_s: Annotated[float, Meta(gt=0, description=PATIENCE)] = PATIENCE_S
    max_turns: Annotated[int, Meta(ge=1, le=1000, description="replies after which the agent gives up")] = 8
    command_timeout_s: Annotated[float, Meta(gt=0, description="seconds that one command may take")] = 30.0
    programs: Annotated[
        tuple[str, ...], Meta(description="programs that commands may use, below the working directory; empty: all")
    ] = ()

    def __post_init__(self) -> None:
        if any(len(example) % 2 or not example for example in self.examples):
            raise ValueError("each of `examples` must end with a reply of the assistant")


class Bash(ProgramHarness):
    """Runs programs/bash_agent.py; the answer is the output of the last command."""

    name = "bash"
    program = "bash_agent.py"
    args_kind = BashArgs

    def metrics(self, stderr: bytes) -> dict[str, float]:
        """How many replies the agent took: it writes a line for each."""
        return {"turns": float(stderr.count(b"turn ") if stderr.startswith(b"turn ") else 0)}
