"""A harness as INIT and RUN ask it: it may be of the user's own, so nothing that it raises or returns is trusted.

Every method raises HarnessError for whatever the harness raises, and for a value of the wrong kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rollyard.harnesses.harness import (
    AgentContext,
    Command,
    Harness,
    Needs,
    ReadFile,
    needs_of,
    open_harness,
    progress_of,
)
from rollyard.schemas.errors import HarnessError, TaskError
from rollyard.schemas.rollout import AgentResult
from rollyard.stages.boundary import boundary, outcome
from rollyard.stages.bounded import TooSlow
from rollyard.stages.evaluator import finite

RESULT_S: Final = 120.0
"""How long `result` may take, which reads files of the sandbox after the agent's own time is over."""
HINT: Final = "mend the harness, or let it raise HarnessError with words of its own; the worker's log has the traceback"


class CheckedHarness:
    """One harness, by the name that the task gives."""

    def __init__(self, name: str, harness: Harness) -> None:
        self.name = name
        self.in_process = harness.in_process
        self._harness = harness

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Raises TaskError."""
        with boundary(self._who("validate_args"), TaskError, HINT):
            self._harness.validate_args(args)

    def needs(self, args: Mapping[str, Any]) -> Needs:
        """What must be in the sandbox for it."""
        who = self._who("needs")
        with boundary(who, HarnessError, HINT):
            found: object = needs_of(self._harness, args)
            if not (isinstance(found, Needs) and isinstance(found.bundle, str)):
                raise _wrong(who, found, "Needs")
            return found

    def files(self, context: AgentContext) -> dict[str, str | bytes]:
        """Files to put into the sandbox's home."""
        who = self._who("files")
        with boundary(who, HarnessError, HINT):
            found: object = self._harness.files(context)
            if not isinstance(found, Mapping):
                raise _wrong(who, found, "a mapping of paths to texts or bytes")
            files: dict[str, str | bytes] = {}
            for path, content in found.items():
                if not (isinstance(path, str) and isinstance(content, str | bytes)):
                    raise _wrong(who, found, "a mapping of paths to texts or bytes")
                files[path] = content.encode() if isinstance(content, str) else content
            return files

    def command(self, context: AgentContext) -> Command:
        """How to start the agent."""
        who = self._who("command")
        with boundary(who, HarnessError, HINT):
            found: object = self._harness.command(context)
            if not isinstance(found, Command) or not _is_command(found):
                raise _wrong(who, found, "a Command of texts, with its argv as a tuple")
            if any("\0" in text for text in (*found.argv, *found.env, *found.env.values())):
                raise HarnessError(
                    f"{who}: an argument or variable holds a NUL, as the prompt may, which no program can be given",
                    hint="hand it over as a file: {prompt_file} of the harness command",
                )
            return Command(tuple(found.argv), dict(found.env), found.stdin)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """What the agent left behind. Raises HarnessError as well when that takes longer than RESULT_S."""
        who = self._who("result")
        try:
            with boundary(who, HarnessError, HINT):
                arguments = (context, exit_code, stdout, stderr, read)
                return _as_result(who, await outcome(self._harness.result, *arguments, timeout_s=RESULT_S))
        except TooSlow:
            raise HarnessError(
                f"{who} took longer than {RESULT_S:g} s", hint="let it read less; the agent's time does not count here"
            ) from None

    def progress(self, stdout: bytes, stderr: bytes) -> dict[str, float]:
        """How far an agent is, by the ends of its output so far. A harness need not say."""
        who = self._who("progress")
        with boundary(who, HarnessError, HINT):
            found: object = progress_of(self._harness, stdout, stderr)
            if not isinstance(found, Mapping):
                raise _wrong(who, found, "a mapping of names to numbers")
            return {str(name): finite(number) for name, number in found.items()}

    async def work(self, context: AgentContext) -> AgentResult:
        """The agent's work, of a harness that starts no process."""
        who = self._who("work")
        with boundary(who, HarnessError, HINT):
            work = self._harness.work  # type: ignore[attr-defined]  # where it is missing, that is said
            return _as_result(who, await outcome(work, context, timeout_s=None))

    @property
    def kept_files(self) -> tuple[str, ...]:
        """Patterns below the home of what is kept of the agent."""
        who = self._who("kept_files")
        with boundary(who, HarnessError, HINT):
            found: object = getattr(self._harness, "kept_files", ())
            if not isinstance(found, tuple | list) or not all(isinstance(each, str) for each in found):
                raise HarnessError(f"{who} is {found!r:.200}", hint="give a tuple of patterns")
            return tuple(found)

    def _who(self, member: str) -> str:
        return f"{member} of the harness {self.name!r}"


def open_checked(name: str) -> CheckedHarness:
    """The harness of that name or dotted path. Raises TaskError."""
    with boundary(f"agent.harness: the class {name!r}", TaskError, "its class takes no arguments"):
        return CheckedHarness(name, open_harness(name))


def _is_command(command: Command) -> bool:
    parts: tuple[object, ...] = (command.argv, command.env, command.stdin)
    match parts:
        case (tuple() | list() as argv, Mapping() as env, bytes()):
            return len(argv) > 0 and all(isinstance(each, str) for each in (*argv, *env, *env.values()))
    return False


def _as_result(who: str, value: object) -> AgentResult:
    """The value as it will be read back from the log."""
    if not isinstance(value, AgentResult):
        raise _wrong(who, value, "an AgentResult")
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=AgentResult)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise HarnessError(f"{who} returned no AgentResult that can be kept: {error}", hint=HINT) from error


def _wrong(who: str, value: object, wanted: str) -> HarnessError:
    return HarnessError(f"{who} returned {value!r:.200}", hint=f"let it return {wanted}")
