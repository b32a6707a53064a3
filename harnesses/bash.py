"""Harness `bash`: the model works in a shell, one command a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from rollyard.harnesses.harness import AgentContext, Command, ReadFile, convert_args, read_result
from rollyard.harnesses.program import BUDGET_CODES, LLM_CODES, PATIENCE, PATIENCE_S, program_command, program_files
from rollyard.schemas.rollout import AgentResult

PROGRAM = "bash_agent.py"
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


class Bash:
    """Runs programs/bash_agent.py."""

    name = "bash"
    in_process = False

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `BashArgs`. Raises TaskError."""
        self._args(args)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The program and its task."""
        args = self._args(context.task.agent.args)
        config = {
            "prompt": context.task.prompt,
            "system": args.system,
            "examples": args.examples,
            "stream": args.stream,
            "patience_s": args.patience_s,
            "max_turns": args.max_turns,
            "command_timeout_s": args.command_timeout_s,
            "programs": args.programs,
        }
        return program_files(PROGRAM, config)

    def command(self, context: AgentContext) -> Command:
        """One argument: the configuration."""
        return program_command(context, PROGRAM)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the output of the last command."""
        metrics = {"turns": float(stderr.count(b"turn ") if stderr.startswith(b"turn ") else 0)}
        return read_result(exit_code, stdout, stderr, metrics=metrics, budget_codes=BUDGET_CODES, llm_codes=LLM_CODES)

    def _args(self, args: Mapping[str, Any]) -> BashArgs:
        return convert_args(args, BashArgs, self.name)
