"""Rule `command`: a shell command in the sandbox; its exit status, or a number that it writes, is the reward."""

from __future__ import annotations

import math
from typing import Annotated, Final

from msgspec import Meta, field

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import EvaluationError, SandboxError
from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict
from rollyard.stages.sandbox import Sandbox, check_path

PROCESS: Final = "eval"
_MAX_REWARD_BYTES: Final = 4096
_SHOWN_OUTPUT_BYTES: Final = 500
# The agent may have written a reward of its own.
_SCRIPT: Final = 'if [ -n "$ROLLYARD_REWARD_FILE" ]; then rm -rf -- "$ROLLYARD_REWARD_FILE"; fi; exec sh -c "$1"'


class CommandRule(RuleArgs, frozen=True, kw_only=True):
    """Runs `command` in the working directory, once: a second evaluation attaches to the first."""

    command: Annotated[str, Meta(min_length=1, description="shell command; exit status 0 gives 1, any other 0")]
    reward_file: Annotated[
        str | None, Meta(description="path to which the command writes the reward; its exit status does not count then")
    ] = None
    files: Annotated[dict[str, str], Meta(description="files put into the working directory before")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        try:
            for path in (*self.files, *([self.reward_file] if self.reward_file is not None else [])):
                check_path(path)
        except SandboxError as error:
            raise ValueError(str(error)) from error

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when there is no reward, SandboxError when the command was lost."""
        sandbox = context.sandbox
        if sandbox is None:
            raise EvaluationError("the rule `command` needs a sandbox", hint="choose another rule or backend")
        await sandbox.put_files(self.files)
        command = Command(
            ("sh", "-c", _SCRIPT, "sh", self.command),
            dict(context.task.sandbox.env) | {"ROLLYARD_REWARD_FILE": self.reward_file or ""},
        )
        await sandbox.start(PROCESS, command, deadline_s=context.timeout_s)
        end = await sandbox.wait(PROCESS)
        if end.reason == "deadline":
            raise EvaluationError(
                f"the evaluation command did not end within {context.timeout_s:g} s", hint="raise timeouts.eval_s"
            )
        if end.reason != "exited":
            raise SandboxError(f"the evaluation command did not end by itself: {end.reason}")
        if self.reward_file is None:
            return Verdict(float(end.exit_code == 0))
        return Verdict(await self._read(sandbox, self.reward_file))

    async def _read(self, sandbox: Sandbox, path: str) -> float:
        text = await sandbox.read_file(path, _MAX_REWARD_BYTES)
        try:
            reward = float((text or b"").decode().strip())
            if not math.isfinite(reward):
                raise ValueError("not finite")
        except ValueError:
            _, errors = await sandbox.output(PROCESS, _SHOWN_OUTPUT_BYTES)
            found = "is missing" if text is None else f"holds {text[:80]!r}, which is no finite number"
            raise EvaluationError(
                f"the reward file {path!r} {found}; the command wrote: {errors.decode(errors='replace')}"
            ) from None
        return reward
