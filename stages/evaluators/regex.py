"""Rule `regex`: 1 when a regular expression matches the answer, else 0.

It runs in a short-lived process: Python cannot interrupt a match, and some patterns take for ever on some answers.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from rollyard.schemas.errors import EvaluationError
from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict

MATCH_S: Final = 5.0
_PROGRAM: Final = """
import json, re, sys
pattern, flags, whole, text = json.load(sys.stdin)
sys.exit(10 if (re.fullmatch if whole else re.search)(pattern, text, flags) else 11)
"""
_MATCHED: Final = {10: True, 11: False}


class Regex(RuleArgs, frozen=True, kw_only=True):
    """Looks for `pattern` (Python's syntax) anywhere in the answer, or matches the whole answer."""

    pattern: Annotated[str, Meta(min_length=1, description="Python regular expression")]
    ignore_case: Annotated[bool, Meta(description="upper and lower case are the same")] = False
    multiline: Annotated[bool, Meta(description="^ and $ match at every line")] = False
    dotall: Annotated[bool, Meta(description="a dot matches a line's end too")] = False
    full: Annotated[bool, Meta(description="match the whole answer, stripped")] = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, self._flags())
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"`pattern` is no regular expression: {error}") from error

    async def reward(self, context: EvalContext) -> Verdict:
        """1.0 or 0.0. Raises EvaluationError when the match takes too long."""
        question = msgspec.json.encode([self.pattern, self._flags(), self.full, context.result.answer.strip()])
        timeout_s = min(MATCH_S, context.timeout_s)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_s):
                _, error = await process.communicate(question)
        except TimeoutError:
            raise EvaluationError(
                f"evaluation.args.pattern: {self.pattern!r} takes longer than {timeout_s:g} s on this answer",
                hint="avoid nested repetitions such as (a+)+",
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode not in _MATCHED:
            raise EvaluationError(f"the regular expression was not matched: {error.decode(errors='replace')[-500:]}")
        return Verdict(float(_MATCHED[process.returncode]))

    def _flags(self) -> int:
        named = ((self.ignore_case, re.IGNORECASE), (self.multiline, re.MULTILINE), (self.dotall, re.DOTALL))
        return sum(int(flag) for wanted, flag in named if wanted)
