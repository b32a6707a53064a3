"""Harness `noop`: no agent, no process. For measuring the pipeline alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollyard.harnesses.harness import AgentContext, Command, ReadFile, convert_args
from rollyard.schemas.errors import HarnessError
from rollyard.schemas.rollout import AgentResult


class NoopArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `noop`."""

    sleep_s: Annotated[float, Meta(ge=0, description="seconds that each rollout takes")] = 0.0
    answer: Annotated[str, Meta(description="the answer of every rollout")] = ""


class Noop:
    """Sleeps for as long as it is told, in the worker; RUN logs one synthetic call."""

    name = "noop"
    in_process = True

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `NoopArgs`. Raises TaskError."""
        convert_args(args, NoopArgs, self.name)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """None."""
        return {}

    def command(self, context: AgentContext) -> Command:
        """Raises HarnessError: there is no process."""
        raise HarnessError("the harness noop starts no process")

    async def work(self, context: AgentContext) -> AgentResult:
        """Sleep, and answer what the task says."""
        args = convert_args(context.task.agent.args, NoopArgs, self.name)
        if args.sleep_s:
            await asyncio.sleep(args.sleep_s)
        return AgentResult(exit_code=0, answer=args.answer)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """Raises HarnessError: there is no process."""
        raise HarnessError("the harness noop leaves nothing behind")
