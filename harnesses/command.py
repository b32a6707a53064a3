"""Harness `command`: an agent of yours, by its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from rollyard.harnesses.bundled import time_limit_s
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

PROMPT_FILE: Final = ".rollyard/prompt.txt"
PLACEHOLDERS: Final = (
    *("prompt", "prompt_file", "base_url", "gateway_url", "api_key", "model", "home", "workdir", "python", "bundle"),
    "time_limit_s",
)

# What stands between quotes or behind a backslash is an argument in any case.
_QUOTED: Final = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_OPERATOR: Final = re.compile(r"(?:&&|\|\|?|;|&|\S+;|&?\d*(?:>>?|<)&?\S*)\Z")
_PLACEHOLDER: Final = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


class CommandArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `command`."""

    command: Annotated[
        str | tuple[str, ...],
        Meta(
            description="program and arguments, as a list or as one line split like a shell does, run without a shell; "
            "{prompt}, {prompt_file}, {base_url} (with /v1), {gateway_url} (without), {api_key}, {model}, {home}, "
            "{workdir}, {python} (an interpreter), {bundle} (its folder) and {time_limit_s} are filled in"
        ),
    ]
    env: Annotated[dict[str, str], Meta(description="further environment, filled in likewise")] = {}
    files: Annotated[dict[str, str], Meta(description="files below the agent's HOME, filled in likewise")] = {}
    bundle: Annotated[str, Meta(description="agent bundle that must be there, as {bundle}; empty: none")] = ""
    stdin: Annotated[str, Meta(description="standard input, filled in likewise")] = ""
    answer_file: Annotated[str, Meta(description="file with the answer; empty: the standard output")] = ""
    budget_codes: Annotated[
        tuple[int, ...], Meta(description="exit statuses that mean that the agent reached its limits")
    ] = ()

    llm_codes: Annotated[
        tuple[int, ...], Meta(description="exit statuses that mean that it got no answer from the model")
    ] = ()

    def __post_init__(self) -> None:
        if not self.argv():
            raise ValueError("`command` is empty")
        if isinstance(self.command, str) and (operator := shell_operator(self.command)):
            raise ValueError(
                f"`command` is run without a shell, so {operator!r} would be an argument of its program; for a shell "
                'write ["sh", "-c", "..."]'
            )

    def argv(self) -> tuple[str, ...]:
        """The command line with its placeholders. Raises ValueError for an unbalanced quote."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command


def shell_operator(line: str) -> str:
    """The first word of a line that only a shell would understand, such as `&&`, `|` or `>file`; empty: none."""
    words = _QUOTED.sub("q", line).split()
    return next((word for word in words if _OPERATOR.match(word)), "")


class CommandLine:
    """Runs the task's own command. It finds the gateway in OPENAI_BASE_URL and OPENAI_API_KEY, or by placeholders."""

    name = "command"
    in_process = False

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `CommandArgs`. Raises TaskError."""
        self._args(args)

    def needs(self, args: Mapping[str, Any]) -> Needs:
        """The bundle that the task names, and Python if the command or a variable asks for it."""
        given = self._args(args)
        return Needs(given.bundle, python=any("{python}" in each for each in (*given.argv(), *given.env.values())))

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The task's own, and the prompt, for command lines that cannot hold it: one argument has at most 128 KiB."""
        values = _values(context)
        mine = {path: _fill(text, values) for path, text in self._args(context.task.agent.args).files.items()}
        return mine | {PROMPT_FILE: context.task.prompt}

    def command(self, context: AgentContext) -> Command:
        """The command line with every placeholder filled in."""
        args = self._args(context.task.agent.args)
        values = _values(context)
        more = {name: _fill(value, values) for name, value in args.env.items()}
        return Command(
            tuple(_fill(word, values) for word in args.argv()),
            agent_environment(context) | more,
            _fill(args.stdin, values).encode(),
        )

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the standard output, or the file that the task names."""
        args = self._args(context.task.agent.args)
        answer = (await read(args.answer_file, 64 * 1024) or b"") if args.answer_file else stdout
        return read_result(exit_code, answer, stderr, budget_codes=args.budget_codes, llm_codes=args.llm_codes)

    def _args(self, args: Mapping[str, Any]) -> CommandArgs:
        return convert_args(args, CommandArgs, self.name)


def _values(context: AgentContext) -> dict[str, str]:
    return {
        "prompt": context.task.prompt,
        "prompt_file": f"{context.home}/{PROMPT_FILE}",
        "base_url": context.base_url,
        "gateway_url": context.base_url.removesuffix("/v1"),
        "api_key": context.api_key,
        "model": context.task.agent.model,
        "home": context.home,
        "workdir": context.workdir,
        "python": context.python,
        "bundle": context.bundle,
        "time_limit_s": str(time_limit_s(context)),
    }


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Only placeholders of the text itself are filled in, not those that a value holds."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)
