"""Rule `command`: a shell command in the sandbox; its exit status, or what it writes to a file, is the reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta, Struct, field

from rollyard.schemas.errors import EvaluationError, SandboxError
from rollyard.stages.evaluator import MAX_LOG_CHARS, EvalContext, Isolation, RuleArgs, Verdict, finite
from rollyard.stages.evaluators.verifier import DROPPED, VerifierLate, run_verifier, said_by
from rollyard.stages.sandbox import Sandbox, check_path

MAX_REWARD_BYTES: Final = 65_536
_SHOWN_OUTPUT_BYTES: Final = 500
# The agent may have written a reward of its own.
_SCRIPT: Final = 'if [ -n "$ROLLYARD_REWARD_FILE" ]; then rm -rf -- "$ROLLYARD_REWARD_FILE"; fi; exec sh -c "$1"'


class _Report(Struct, frozen=True, forbid_unknown_fields=True):
    """A reward file that is a JSON object."""

    reward: float | None
    metrics: dict[str, float] = {}
    turn_rewards: tuple[float | None, ...] = ()
    rewards: dict[str, float] = {}


class CommandRule(RuleArgs, frozen=True, kw_only=True):
    """Runs `command` in the working directory, once: a second evaluation attaches to the first."""

    isolation: ClassVar[Isolation] = "fresh"

    command: Annotated[str, Meta(min_length=1, description="shell command; exit status 0 gives 1, any other 0")]
    reward_file: Annotated[
        str | None,
        Meta(
            description="path to which it writes the reward, a number or a JSON object; its exit status counts no more"
        ),
    ] = None
    files: Annotated[dict[str, str], Meta(description="files put into the working directory before")] = field(
        default_factory=dict
    )
    drop: Annotated[
        tuple[str, ...], Meta(description="names of files of the agent that a fresh sandbox does not get, * and ? work")
    ] = DROPPED
    copy: Annotated[
        tuple[str, ...], Meta(description="absolute paths of the agent's that a fresh sandbox gets as well")
    ] = ()
    timeout_reward: Annotated[
        float | None, Meta(description="reward when it does not end in time; null: the evaluation has failed")
    ] = None

    def __post_init__(self) -> None:
        try:
            for path in (*self.files, *([self.reward_file] if self.reward_file is not None else [])):
                check_path(path)
        except SandboxError as error:
            raise ValueError(str(error)) from error
        if any(not path.startswith("/") for path in self.copy):
            raise ValueError("`copy` takes absolute paths; the working directory is copied anyway")

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when there is no reward, SandboxError when the command was lost."""
        sandbox = context.place("command")
        await sandbox.put_files(self.files)
        try:
            end = await run_verifier(
                context, _SCRIPT, (self.command,), env={"ROLLYARD_REWARD_FILE": self.reward_file or ""}
            )
        except VerifierLate:
            if self.timeout_reward is None:
                raise
            return Verdict(self.timeout_reward, {"timed_out": 1.0})
        log = await said_by(context, sandbox, MAX_LOG_CHARS)
        if self.reward_file is None:
            return Verdict(float(end.exit_code == 0), log=log)
        return replace(await self._read(context, sandbox, self.reward_file), log=log)

    async def _read(self, context: EvalContext, sandbox: Sandbox, path: str) -> Verdict:
        text = await sandbox.read_file(path, MAX_REWARD_BYTES + 1)
        try:
            return _verdict(text)
        except (ValueError, TypeError, EvaluationError) as error:
            _, errors = await sandbox.output(context.process, _SHOWN_OUTPUT_BYTES)
            found = error.message if isinstance(error, EvaluationError) else str(error)
            wrote = errors.decode(errors="replace").strip() or "nothing"
            raise EvaluationError(f"the reward file {path!r} {found}; the command wrote: {wrote}") from None


def _verdict(text: bytes | None) -> Verdict:
    """What a reward file says. Raises ValueError, TypeError or EvaluationError."""
    if text is None:
        raise ValueError("is missing")
    if len(text) > MAX_REWARD_BYTES:
        raise ValueError(f"has over {MAX_REWARD_BYTES:,} bytes")
    if text.lstrip().startswith(b"{"):
        try:
            report = msgspec.json.decode(text, type=_Report)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"holds {text[:80]!r}: {error}") from None
        metrics = {name: finite(number) for name, number in report.metrics.items()}
        rewards = {name: finite(number) for name, number in report.rewards.items()}
        return Verdict(None if report.reward is None else finite(report.reward), metrics, report.turn_rewards, rewards)
    try:
        return Verdict(finite(float(text.decode().strip())))
    except (ValueError, TypeError):
        raise ValueError(f"holds {text[:80]!r}, which is no finite number") from None
