"""Harness `ask`: one question, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollyard.harnesses.harness import AgentContext, Command, ReadFile, convert_args, read_result
from rollyard.harnesses.program import BUDGET_CODES, LLM_CODES, PATIENCE, PATIENCE_S, program_command, program_files
from rollyard.schemas.rollout import AgentResult

PROGRAM = "ask_agent.py"


class AskArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `ask`."""

    system: Annotated[str, Meta(description="system message; empty: none")] = ""
    examples: Annotated[tuple[tuple[str, str], ...], Meta(description="questions with their answers")] = ()
    stream: Annotated[bool, Meta(description="ask for a stream")] = True
    patience_s: Annotated[float, Meta(gt=0, description=PATIENCE)] = PATIENCE_S


class Ask:
    """Runs programs/ask_agent.py."""

    name = "ask"
    in_process = False

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `AskArgs`. Raises TaskError."""
        self._args(args)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The program and its question."""
        args = self._args(context.task.agent.args)
        config = {
            "prompt": context.task.prompt,
            "system": args.system,
            "examples": args.examples,
            "stream": args.stream,
            "patience_s": args.patience_s,
        }
        return program_files(PROGRAM, config)

    def command(self, context: AgentContext) -> Command:
        """One argument: the configuration."""
        return program_command(context, PROGRAM)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the standard output."""
        return read_result(exit_code, stdout, stderr, budget_codes=BUDGET_CODES, llm_codes=LLM_CODES)

    def _args(self, args: Mapping[str, Any]) -> AskArgs:
        return convert_args(args, AskArgs, self.name)
