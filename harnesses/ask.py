"""Harness `ask`: one question, one answer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from rollyard.harnesses.program import PATIENCE, PATIENCE_S, ProgramHarness


class AskArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `ask`."""

    system: Annotated[str, Meta(description="system message; empty: none")] = ""
    examples: Annotated[tuple[tuple[str, str], ...], Meta(description="questions with their answers")] = ()
    stream: Annotated[bool, Meta(description="ask for a stream")] = True
    patience_s: Annotated[float, Meta(gt=0, description=PATIENCE)] = PATIENCE_S


class Ask(ProgramHarness):
    """Runs programs/ask_agent.py; the answer is its standard output."""

    name = "ask"
    program = "ask_agent.py"
    args_kind = AskArgs
