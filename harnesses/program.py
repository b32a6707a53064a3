"""What harnesses of the shipped programs share: the program lies in the sandbox's home beside its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec import Struct, structs

from rollyard.harnesses.harness import (
    AgentContext,
    Command,
    Needs,
    ReadFile,
    agent_environment,
    convert_args,
    read_result,
)
from rollyard.schemas.rollout import AgentResult

FOLDER: Final = ".rollyard"
CLIENT: Final = "model_client.py"
BUDGET_CODES: Final = (2,)
LLM_CODES: Final = (3,)
PATIENCE: Final = "seconds for which a lost connection or a refusal that may pass is tried again"
PATIENCE_S: Final = 60.0

_PROGRAMS: Final = Path(__file__).with_name("programs")


class ProgramHarness:
    """A harness that runs one of the shipped programs. Subclasses name it and the struct of its arguments."""

    name: ClassVar[str]
    in_process = False
    program: ClassVar[str]
    args_kind: ClassVar[type[Struct]]

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `args_kind`. Raises TaskError."""
        convert_args(args, self.args_kind, self.name)

    def needs(self, args: Mapping[str, Any]) -> Needs:
        """A Python interpreter, 3.9 or newer."""
        return Needs(python=True)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The program, its client, and its configuration: the prompt and the arguments."""
        args = convert_args(context.task.agent.args, self.args_kind, self.name)
        config = {"prompt": context.task.prompt} | structs.asdict(args)
        return {
            f"{FOLDER}/{self.program}": (_PROGRAMS / self.program).read_bytes(),
            f"{FOLDER}/{CLIENT}": (_PROGRAMS / CLIENT).read_bytes(),
            f"{FOLDER}/config.json": json.dumps(config),
        }

    def command(self, context: AgentContext) -> Command:
        """How to start it: without site packages, which would double the time to start."""
        folder = f"{context.home}/{FOLDER}"
        argv = (context.python, "-E", "-s", "-S", f"{folder}/{self.program}", f"{folder}/config.json")
        return Command(argv, agent_environment(context))

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the standard output; what ended the agent, its exit status."""
        return read_result(
            exit_code,
            stdout,
            stderr,
            metrics=self.metrics(stderr),
            budget_codes=BUDGET_CODES,
            llm_codes=LLM_CODES,
        )

    def metrics(self, stderr: bytes) -> dict[str, float]:
        """Numbers to be read off the standard error; none by default."""
        return {}
