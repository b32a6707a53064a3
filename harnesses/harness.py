"""What a harness is: how one kind of agent is prepared, started and read. One file an agent.

A harness does no I/O. It says which files to put into the sandbox and which command to run there, and reads what the
agent left behind. Whatever the agent asks a model goes to `AgentContext.base_url`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.task import Task

MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_TAIL_BYTES: Final = 4 * 1024
NO_MODEL_HINT: Final = "is a model server registered, and does it answer? `rollyard doctor` tells"

HARNESSES: Final = Catalogue(
    "harness",
    "rollyard.harnesses",
    {
        "ask": "rollyard.harnesses.ask:Ask",
        "bash": "rollyard.harnesses.bash:Bash",
        "claude_code": "rollyard.harnesses.claude_code:ClaudeCode",
        "codex": "rollyard.harnesses.codex:Codex",
        "command": "rollyard.harnesses.command:CommandLine",
        "hermes": "rollyard.harnesses.hermes:Hermes",
        "mini_swe_agent": "rollyard.harnesses.mini_swe_agent:MiniSweAgent",
        "noop": "rollyard.harnesses.noop:Noop",
        "openclaw": "rollyard.harnesses.openclaw:Openclaw",
        "opencode": "rollyard.harnesses.opencode:Opencode",
    },
    TaskError,
)

Args = TypeVar("Args", bound=msgspec.Struct)
ReadFile = Callable[[str, int], Awaitable[bytes | None]]
"""Reads a file of the sandbox: (path, most bytes) -> content, or None when there is no such file."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start in a sandbox. `env` is added to the sandbox's own environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """What a harness knows about one attempt. `home` and `workdir` are paths as seen inside the sandbox."""

    rollout: Rollout
    attempt: int
    task: Task
    base_url: str  # of the gateway, with /v1
    api_key: str  # signed session key; empty for a harness that starts no process
    home: str
    workdir: str
    python: str = sys.executable  # interpreter inside the sandbox, 3.11 or newer
    bundle: str = ""  # folder of the agent's bundle inside the sandbox, absolute; empty: it needs none


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be in the sandbox before the agent can start, beside its files."""

    bundle: str = ""  # name of its agent bundle; empty: it needs none
    python: bool = False  # whether it is a script that runs by `AgentContext.python`


@runtime_checkable
class Harness(Protocol):
    """One kind of agent. `result` sets `AgentResult.failure` when the agent did not finish its work.

    Two more members may be left out; `needs_of` and `progress_of` ask for them:

        def needs(self, args: Mapping[str, Any]) -> Needs
        def progress(self, stdout: bytes, stderr: bytes) -> Mapping[str, float]
    """

    name: str
    in_process: bool

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Raises TaskError that names the argument of `Task.agent.args` which is not acceptable."""
        ...

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """Files to put into the sandbox's home: relative path -> content."""
        ...

    def command(self, context: AgentContext) -> Command:
        """How to start the agent, with `Task.sandbox.env` in its environment. Raises HarnessError when it is not
        installed.
        """
        ...

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """What the agent left behind. Raises HarnessError when that cannot be read."""
        ...


@runtime_checkable
class InProcessHarness(Harness, Protocol):
    """A harness with `in_process` set: it starts no process; RUN awaits `work` instead."""

    async def work(self, context: AgentContext) -> AgentResult:
        """Do the agent's work in the worker's own process."""
        ...


def needs_of(harness: Harness, args: Mapping[str, Any]) -> Needs:
    """What it needs with these arguments; nothing, unless it says so. Raises TaskError."""
    needs: Needs = harness.needs(args) if hasattr(harness, "needs") else Needs()
    return needs


def progress_of(harness: Harness, stdout: bytes, stderr: bytes) -> Mapping[str, float]:
    """How far an agent is that still runs, by the ends of its output so far: numbers that only grow, such as turns."""
    found: Mapping[str, float] = harness.progress(stdout, stderr) if hasattr(harness, "progress") else {}
    return found


@cache
def open_harness(name: str) -> Harness:
    """The harness of that name or dotted path; one for all rollouts, since it keeps nothing. Raises TaskError."""
    harness = HARNESSES.load(name)()
    if not isinstance(harness, Harness):
        raise TaskError(
            f"agent.harness: {name!r} is no harness",
            hint="it must have the members of rollyard.harnesses.harness.Harness",
        )
    return harness


def convert_args(args: Mapping[str, Any], kind: type[Args], harness: str) -> Args:
    """The arguments of a task's agent as a struct. Raises TaskError that names the argument."""
    try:
        return msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        known = ", ".join(kind.__struct_fields__) or "none"
        raise TaskError(
            f"agent.args{where.rstrip('`')}: {what}", hint=f"arguments of the harness {harness} are: {known}"
        ) from error


def agent_environment(context: AgentContext) -> dict[str, str]:
    """The task's own variables, and those by which most programs find an OpenAI-compatible or Anthropic server."""
    return {
        **context.task.sandbox.env,
        "OPENAI_BASE_URL": context.base_url,
        "OPENAI_API_KEY": context.api_key,
        "OPENAI_MODEL": context.task.agent.model,
        "ANTHROPIC_BASE_URL": context.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": context.api_key,
    }


_SIGNAL_HINTS: Final = {
    -signal.SIGXFSZ: "it wrote a file, or output, of more than sandbox.limits.max_file_bytes",
    -signal.SIGKILL: "was it out of memory, or did it kill itself?",
}


def read_result(
    exit_code: int | None,
    answer: bytes,
    stderr: bytes,
    *,
    metrics: Mapping[str, float] | None = None,
    budget_codes: tuple[int, ...] = (),
    llm_codes: tuple[int, ...] = (),
) -> AgentResult:
    """A result from an exit status: 0 is success, `budget_codes` mean that the agent ran into its limits, `llm_codes`
    that it got no answer from the model."""
    failure = None
    tail = stderr[-MAX_TAIL_BYTES:].decode(errors="replace").strip()
    if exit_code in budget_codes:
        failure = Failure.of("agent_budget", f"the agent used up its limits: {_last_line(tail)}")
    elif exit_code in llm_codes:
        failure = Failure.of("llm", f"the agent got no answer from the model: {_last_line(tail)}", NO_MODEL_HINT)
    elif exit_code is None:
        failure = Failure.of("agent", "the agent's exit status is not known")
    elif exit_code != 0:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit status {exit_code}"
        failure = Failure.of("agent", f"the agent {how}: {_last_line(tail)}", _SIGNAL_HINTS.get(exit_code, ""))
    return AgentResult(
        exit_code=exit_code,
        answer=answer[:MAX_ANSWER_BYTES].decode(errors="replace").strip(),
        output_tail=tail,
        metrics=dict(metrics or {}),
        failure=failure,
    )


def _last_line(text: str) -> str:
    return text.splitlines()[-1][:500] if text else "it wrote nothing to its standard error"
