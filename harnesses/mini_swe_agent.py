"""Harness `mini_swe_agent`: mini-swe-agent from PyPI, unchanged and headless, over the Chat protocol.

Its trajectory file says how it ended; its exit status says little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

from rollyard.harnesses.bundled import AgentArgs, BundledHarness
from rollyard.harnesses.bundles.python import PythonRecipe
from rollyard.harnesses.harness import (
    NO_MODEL_HINT,
    AgentContext,
    Command,
    ReadFile,
    agent_environment,
    convert_args,
    read_result,
)
from rollyard.harnesses.reading import LIMITS
from rollyard.schemas.errors import HarnessError
from rollyard.schemas.failure import Failure, FailureClass
from rollyard.schemas.rollout import AgentResult

BUNDLE: Final = PythonRecipe(
    name="mini_swe_agent",
    version="2.4.6",
    program="mini",
    requirement="mini-swe-agent==2.4.6",
    main="minisweagent.run.mini:app",
    trial=("--help",),
    # Of its library for data sets, and the pages of litellm's own server.
    drop=("pyarrow*", "pandas*", "litellm/proxy/_experimental/out", "litellm/proxy/swagger"),
)
CONFIG: Final = ".rollyard/mini-swe-agent.yaml"
TRAJECTORY: Final = ".rollyard/traj.json"
MAX_TRAJECTORY_BYTES: Final = 256 << 20

_LIMITS: Final = ("LimitsExceeded", "TimeExceeded", "ContextWindowExceededError")
_NO_MODEL: Final = ("APIConnectionError", "InternalServerError", "ServiceUnavailableError", "Timeout", "RateLimitError")


class MiniArgs(AgentArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `mini_swe_agent`."""

    step_limit: Annotated[int, Meta(ge=1, description="model calls; null: the agent's max_calls")] | None = None
    command_timeout_s: Annotated[int, Meta(ge=1, description="seconds that one command may take")] = 30


class MiniSweAgent(BundledHarness):
    """Runs the program `mini`. The task and all settings are in a configuration file in the sandbox's home."""

    name = "mini_swe_agent"
    bundle = BUNDLE
    args_kind = MiniArgs
    kept_files = (TRAJECTORY,)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """The configuration file; JSON is YAML."""
        agent = context.task.agent
        args = convert_args(agent.args, MiniArgs, self.name)
        config = {
            "run": {"task": context.task.prompt},
            "agent": {"step_limit": args.step_limit or agent.max_calls or 0},
            "environment": {"timeout": args.command_timeout_s},
            "model": {"cost_tracking": "ignore_errors", "model_kwargs": {"api_base": context.base_url}},
        }
        return {CONFIG: json.dumps(config)}

    def command(self, context: AgentContext) -> Command:
        """Raises HarnessError."""
        args = convert_args(context.task.agent.args, MiniArgs, self.name)
        argv = (
            self.program(context),
            *("-m", f"openai/{context.task.agent.model}"),
            "--yolo",
            "--exit-immediately",
            *("--cost-limit", "0"),
            *("-c", "mini.yaml", "-c", f"{context.home}/{CONFIG}"),
            *("-o", f"{context.home}/{TRAJECTORY}"),
            *args.flags,
        )
        env = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "6",  # waits of about a minute together
            # Else litellm asks the internet for prices.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        }
        return Command(argv, env | agent_environment(context) | args.env)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """Reads traj.json; the agent has done its work when its exit status is Submitted."""
        text = await read(f"{context.home}/{TRAJECTORY}", MAX_TRAJECTORY_BYTES)
        return read_mini(exit_code, text, stderr or stdout)

    def progress(self, stdout: bytes, stderr: bytes) -> Mapping[str, float]:
        """Model calls so far: it counts them aloud."""
        return {"calls": float(stdout.count(b"mini-swe-agent (step "))}


def read_mini(exit_code: int | None, trajectory: bytes | None, tail: bytes) -> AgentResult:
    """What the trajectory file says; None: it was not written. Raises HarnessError for one that cannot be read though
    the agent came to its end."""
    if trajectory is None:
        return read_result(1 if exit_code == 0 else exit_code, b"", tail)
    try:
        whole = json.loads(trajectory)
        info, messages = whole["info"], whole["messages"]
        exit_status, submission = str(info["exit_status"]), str(info["submission"])
        calls = float(info["model_stats"]["api_calls"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        if exit_code != 0:  # it was ended while it wrote
            return read_result(exit_code, b"", tail)
        raise HarnessError(f"{TRAJECTORY} of mini-swe-agent cannot be read: {error!r}") from error
    read_so_far = read_result(0, submission.encode(errors="replace"), tail, metrics={"calls": calls})
    return AgentResult(
        exit_code=exit_code,
        answer=read_so_far.answer,
        output_tail=read_so_far.output_tail,
        metrics=read_so_far.metrics,
        failure=_failure(exit_status, str(messages[-1:])),
    )


def _failure(exit_status: str, said: str) -> Failure | None:
    if exit_status == "Submitted":
        return None
    kind: FailureClass = "agent"
    if exit_status in _LIMITS or (exit_status == "BadRequestError" and LIMITS.search(said)):
        kind = "agent_budget"
    elif exit_status in _NO_MODEL:
        kind = "llm"
    hint = NO_MODEL_HINT if kind == "llm" else ""
    return Failure.of(kind, f"mini-swe-agent ended with exit status {exit_status or 'unknown'}", hint)
