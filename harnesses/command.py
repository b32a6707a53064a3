"""Harness `command`: an agent of yours, by its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from rollyard.harnesses.harness import AgentContext, Command, ReadFile, agent_environment, convert_args, read_result
from rollyard.schemas.rollout import AgentResult

PROMPT_FILE: Final = ".rollyard/prompt.txt"
PLACEHOLDERS: Final = ("prompt", "prompt_file", "base_url", "api_key", "model", "home", "workdir")

_PLACEHOLDER: Final = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


class CommandArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `command`."""

    command: Annotated[
        str | tuple[str, ...],
        Meta(
            description="program and arguments, as a list or as one line split like a shell does, run without a shell; "
            "{prompt}, {prompt_file}, {base_url}, {api_key}, {model}, {home} and {workdir} are filled in"
        ),
    ]
    env: Annotated[dict[str, str], Meta(description="further environment, filled in likewise")] = {}
    stdin: Annotated[str, Meta(description="standard input, filled in likewise")] = ""
    answer_file: Annotated[str, Meta(description="file with the answer; empty: the standard output")] = ""
    budget_codes: Annotated[
        tuple[int, ...], Meta(description="exit statuses that mean that the agent reached its limits")
    ] = ()

    def __post_init__(self) -> None:
        if not self.argv():
            raise ValueError("`command` is empty")

    def argv(self) -> tuple[str, ...]:
        """The command line with its placeholders. Raises ValueError for an unbalanced quote."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command


class CommandLine:
    """Runs the task's own command. It finds the gateway in OPENAI_BASE_URL and OPENAI_API_KEY, or by placeholders."""

    name = "command"
    in_process = False

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `CommandArgs`. Raises TaskError."""
        self._args(args)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The prompt, for command lines that cannot hold it: one argument has at most 128 KiB."""
        return {PROMPT_FILE: context.task.prompt}

    def command(self, context: AgentContext) -> Command:
        """The command line with every placeholder filled in."""
        args = self._args(context.task.agent.args)
        values = {
            "prompt": context.task.prompt,
            "prompt_file": f"{context.home}/{PROMPT_FILE}",
            "base_url": context.base_url,
            "api_key": context.api_key,
            "model": context.task.agent.model,
            "home": context.home,
            "workdir": context.workdir,
        }

        def fill(text: str) -> str:
            return _PLACEHOLDER.sub(lambda match: values[match[1]], text)

        more = {name: fill(value) for name, value in args.env.items()}
        return Command(
            tuple(fill(word) for word in args.argv()), agent_environment(context) | more, fill(args.stdin).encode()
        )

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the standard output, or the file that the task names."""
        args = self._args(context.task.agent.args)
        answer = (await read(args.answer_file, 64 * 1024) or b"") if args.answer_file else stdout
        return read_result(exit_code, answer, stderr, budget_codes=args.budget_codes)

    def _args(self, args: Mapping[str, Any]) -> CommandArgs:
        return convert_args(args, CommandArgs, self.name)
