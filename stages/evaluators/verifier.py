"""Running a rule's own program in the sandbox, and telling its failures from the agent's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import EvaluationError, SandboxError
from rollyard.stages.evaluator import EvalContext
from rollyard.stages.sandbox import ProcessEnd, Sandbox

DROPPED: Final = ("sitecustomize.py", "usercustomize.py")
"""Files that Python may run at its start, and no program needs: they are not carried into a fresh sandbox."""
SHORT_S: Final = 60.0


class VerifierLate(EvaluationError):
    """The verifier did not end in time."""


async def run_verifier(
    context: EvalContext,
    script: str,
    arguments: tuple[str, ...] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> ProcessEnd:
    """Run a shell script under the context's process name, or attach to it, and wait for its end.

    Raises VerifierLate, EvaluationError when it was out of memory, SandboxError when it was lost.
    """
    sandbox = context.place(context.task.evaluation.rule)
    limit_s = context.timeout_s if timeout_s is None else min(timeout_s, context.timeout_s)
    command = Command(("sh", "-c", script, "sh", *arguments), dict(context.task.sandbox.env) | dict(env or {}))
    await sandbox.start(context.process, command, deadline_s=limit_s)
    end = await sandbox.wait(context.process)
    if end.reason == "deadline":
        raise VerifierLate(
            f"the evaluation command did not end within {limit_s:g} s",
            hint="raise timeouts.eval_s, or say by `timeout_reward` what that is worth",
        )
    if end.reason == "memory":
        raise EvaluationError("the evaluation command was out of memory", hint="raise sandbox.limits.memory_bytes")
    if end.reason != "exited":
        raise SandboxError(f"the evaluation command did not end by itself: {end.reason}")
    return end


async def said_by(context: EvalContext, sandbox: Sandbox, max_bytes: int) -> str:
    """The end of what the verifier wrote, standard output first."""
    stdout, stderr = await sandbox.output(context.process, max_bytes)
    parts = [part.decode(errors="replace").strip() for part in (stdout, stderr)]
    return "\n".join(part for part in parts if part)


async def must(sandbox: Sandbox, script: str, *arguments: str, user: str | None = None, what: str) -> None:
    """Run a short script that has to work. Raises EvaluationError that says `what` did not."""
    ended = await sandbox.exec(("sh", "-c", script, "sh", *arguments), user=user, timeout_s=SHORT_S)
    if ended.exit_code != 0:
        said = (ended.stderr or ended.stdout).decode(errors="replace").strip()[-500:]
        raise EvaluationError(f"{what}: {said or f'exit status {ended.exit_code}'}")
