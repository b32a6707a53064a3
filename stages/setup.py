"""The setup commands of a task: each with its tries, its pauses, and its own part of the time that is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

import structlog

from rollyard.schemas.failure import Failure
from rollyard.schemas.sandbox import SetupStep
from rollyard.stages.sandbox import ExecResult, Sandbox
from rollyard.stages.stage import StageFailed

log = structlog.get_logger(__name__)

FIRST_PAUSE_S: Final = 0.5
MOST_PAUSE_S: Final = 30.0
TAIL_CHARS: Final = 1_500
LEAST_S: Final = 0.05


def pause_s(tries: int) -> float:
    """How long to wait after so many failed tries, in seconds."""
    return float(min(FIRST_PAUSE_S * 2 ** (tries - 1), MOST_PAUSE_S))


async def run_step(
    sandbox: Sandbox, number: int, step: SetupStep, env: Mapping[str, str], *, until_s: float, limit_s: float
) -> None:
    """Run one step until it works or its tries are used up; `until_s`, on the monotonic clock, is the end of all time.

    Raises SandboxError, and StageFailed of class init with the last lines that the command wrote.
    """
    for tries in range(1, step.max_tries + 1):
        left_s = max(until_s - time.monotonic(), LEAST_S)
        timeout_s = min(step.timeout_s or left_s, left_s)
        ended = await sandbox.exec(step.run, env=env, user=step.user or None, timeout_s=timeout_s)
        if not ended.timed_out and ended.exit_code == 0:
            return
        rest = max(until_s - time.monotonic(), 0.0)
        if ended.timed_out and timeout_s >= left_s:
            break
        if tries < step.max_tries and rest > pause_s(tries):
            log.info("setup_tried_again", number=number, tries=tries, pause_s=pause_s(tries))
            await asyncio.sleep(pause_s(tries))
        elif tries < step.max_tries:
            break
    raise StageFailed(_failure(number, step, ended, tries, limit_s))


def _failure(number: int, step: SetupStep, ended: ExecResult, tries: int, limit_s: float) -> Failure:
    how = f"ended with {ended.exit_code}"
    hint = "see sandbox.setup"
    if ended.timed_out and step.timeout_s is not None and step.timeout_s < limit_s:
        how, hint = f"took longer than its {step.timeout_s:g} s", "raise timeout_s of the step in sandbox.setup"
    elif ended.timed_out:
        how, hint = f"was still running when the {limit_s:g} s of INIT were over", "raise timeouts.init_s"
    elif ended.exit_code is not None and ended.exit_code < 0:
        how = f"was killed by signal {-ended.exit_code}"
    again = f", in {tries} tries" if tries > 1 else ""
    said = (ended.stderr.strip() or ended.stdout.strip())[-TAIL_CHARS:].decode(errors="replace").strip()
    return Failure.of("init", f"setup command {number} {how}{again}: {said or 'it wrote nothing'}", hint)
