"""Harness `mini_swe_agent`: mini-swe-agent from PyPI, unchanged and headless, in a virtual environment of its own.

`rollyard agents install mini_swe_agent` installs it, with the versions of locks/mini_swe_agent.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from rollyard.harnesses.harness import (
    NO_MODEL_HINT,
    AgentContext,
    Command,
    ReadFile,
    agent_environment,
    convert_args,
    read_result,
)
from rollyard.schemas.errors import HarnessError
from rollyard.schemas.failure import Failure, FailureClass
from rollyard.schemas.rollout import AgentResult

LOCK: Final = Path(__file__).with_name("locks") / "mini_swe_agent.txt"
CONFIG: Final = ".rollyard/mini-swe-agent.yaml"
TRAJECTORY: Final = ".rollyard/traj.json"
MAX_TRAJECTORY_BYTES: Final = 256 << 20
MEND: Final = "run: rollyard agents install mini_swe_agent"

_STAMP: Final = "installed.txt"
"""A copy of the lock file that was installed."""

_LIMITS: Final = ("LimitsExceeded", "TimeExceeded", "ContextWindowExceededError")
_NO_MODEL: Final = ("APIConnectionError", "InternalServerError", "ServiceUnavailableError", "Timeout", "RateLimitError")


class MiniArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `mini_swe_agent`."""

    step_limit: Annotated[int, Meta(ge=1, description="model calls; null: the agent's max_calls")] | None = None
    command_timeout_s: Annotated[int, Meta(ge=1, description="seconds that one command may take")] = 30


class MiniSweAgent:
    """Runs the program `mini`. The task and all settings are in a configuration file in the sandbox's home."""

    name = "mini_swe_agent"
    in_process = False

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `MiniArgs`. Raises TaskError."""
        self._args(args)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The configuration file; JSON is YAML."""
        agent = context.task.agent
        args = self._args(agent.args)
        config = {
            "run": {"task": context.task.prompt},
            "agent": {"step_limit": args.step_limit or agent.max_calls or 0},
            "environment": {"timeout": args.command_timeout_s},
            "model": {"cost_tracking": "ignore_errors", "model_kwargs": {"api_base": context.base_url}},
        }
        return {CONFIG: json.dumps(config)}

    def command(self, context: AgentContext) -> Command:
        """Raises HarnessError when the agent is not installed on this machine."""
        program = tool_folder() / "bin" / "mini"
        if not program.is_file():
            raise HarnessError(f"mini-swe-agent is not installed: there is no {program}", hint=MEND)
        argv = (
            str(program),
            *("-m", f"openai/{context.task.agent.model}"),
            "--yolo",
            "--exit-immediately",
            *("--cost-limit", "0"),
            *("-c", "mini.yaml", "-c", f"{context.home}/{CONFIG}"),
            *("-o", f"{context.home}/{TRAJECTORY}"),
        )
        env = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "6",  # waits of about a minute together
            # Else litellm asks the internet for prices.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return Command(argv, env | agent_environment(context))

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """Reads traj.json; the agent has done its work when its exit status is Submitted."""
        text = await read(f"{context.home}/{TRAJECTORY}", MAX_TRAJECTORY_BYTES)
        tail = stderr or stdout
        if text is None:
            return read_result(exit_code or 1, b"", tail)
        try:
            info = json.loads(text)["info"]
            exit_status, submission = str(info["exit_status"]), str(info["submission"])
            calls = float(info["model_stats"]["api_calls"])
        except (ValueError, KeyError, TypeError) as error:
            if exit_code != 0:  # it was ended while it wrote
                return read_result(exit_code, b"", tail)
            raise HarnessError(f"{TRAJECTORY} of mini-swe-agent cannot be read: {error!r}") from error
        read_so_far = read_result(0, submission.encode(errors="replace"), tail, metrics={"model_calls": calls})
        return AgentResult(
            exit_code=exit_code,
            answer=read_so_far.answer,
            output_tail=read_so_far.output_tail,
            metrics=read_so_far.metrics,
            failure=_failure(exit_status, text),
        )

    def _args(self, args: Mapping[str, Any]) -> MiniArgs:
        return convert_args(args, MiniArgs, self.name)


def _failure(exit_status: str, trajectory: bytes) -> Failure | None:
    if exit_status == "Submitted":
        return None
    kind: FailureClass = "agent"
    if exit_status in _LIMITS or (exit_status == "BadRequestError" and b"session_limit_exceeded" in trajectory):
        kind = "agent_budget"
    elif exit_status in _NO_MODEL:
        kind = "llm"
    hint = NO_MODEL_HINT if kind == "llm" else ""
    return Failure.of(kind, f"mini-swe-agent ended with exit status {exit_status or 'unknown'}", hint)


def tool_folder() -> Path:
    """The agent's virtual environment: in ROLLYARD_TOOLS, else ~/.cache/rollyard/tools."""
    tools = os.environ.get("ROLLYARD_TOOLS")
    return (Path(tools) if tools else Path.home() / ".cache" / "rollyard" / "tools") / "mini-swe-agent"


def is_installed() -> bool:
    """Whether the virtual environment is there, whole, with the locked versions."""
    folder = tool_folder()
    stamp = folder / _STAMP
    # An interpreter that went away with an update leaves a link to nothing.
    return (folder / "bin" / "python").exists() and stamp.is_file() and stamp.read_bytes() == LOCK.read_bytes()


def install() -> Path:
    """Make the virtual environment and install the locked versions; returns its folder. Raises HarnessError."""
    folder = tool_folder()
    try:
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(LOCK)]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (folder / _STAMP).write_bytes(LOCK.read_bytes())
    except (OSError, subprocess.CalledProcessError) as error:
        raise HarnessError(
            f"mini-swe-agent could not be installed into {folder}: {error}",
            hint="does pip reach a package index? is python3-venv installed?",
        ) from error
    return folder
