"""Rule `math`: 1 when the answer is mathematically equal to an accepted one, else 0. By the library math-verify.

The comparison runs in a process of its own: algebra can take for ever on some expressions, and all memory.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from msgspec import Meta

from rollyard.schemas.errors import EvaluationError
from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict
from rollyard.stages.evaluators.math_process import MathProcesses, MathTrouble

COMPARE_S: Final = 15.0
MAX_ANSWER_CHARS: Final = 20_000
_PROCESSES: Final = MathProcesses()


class Math(RuleArgs, frozen=True, kw_only=True):
    """Reads the final expression of the answer, LaTeX or plain, and compares it with each accepted one.

    What stands in \\boxed{} goes before anything else. 1/2, 0.5 and \\frac{1}{2} are equal; sets, intervals, equations,
    matrices, units and percent signs are understood.
    """

    answer: Annotated[str | None, Meta(description="the accepted answer, LaTeX or plain")] = None
    answers: Annotated[tuple[str, ...], Meta(description="accepted answers, of which any one will do")] = ()
    digits: Annotated[int, Meta(ge=1, le=15, description="decimal places to which numbers are compared")] = 6
    boxed_only: Annotated[bool, Meta(description="only what stands in \\boxed{} is read")] = False

    def __post_init__(self) -> None:
        if not all(text.strip() for text in self._accepted()):
            raise ValueError("an accepted answer is empty")
        if not self._accepted():
            raise ValueError("give `answer` or `answers`")

    async def reward(self, context: EvalContext) -> Verdict:
        """1.0 or 0.0. Raises EvaluationError when an accepted answer cannot be read, or comparing takes too long."""
        question: dict[str, Any] = {
            "accepted": self._accepted(),
            # The final expression stands at the end.
            "answer": context.result.answer[-MAX_ANSWER_CHARS:],
            "digits": self.digits,
            "boxed_only": self.boxed_only,
        }
        limit_s = min(COMPARE_S, context.timeout_s)
        try:
            found = await asyncio.to_thread(_PROCESSES.ask, question, limit_s)
        except MathTrouble as trouble:
            raise EvaluationError(str(trouble), hint="see evaluation.args of the rule math") from trouble
        return Verdict(float(found["equal"]), {"found": float(found["found"])})

    def _accepted(self) -> list[str]:
        return [*([] if self.answer is None else [self.answer]), *self.answers]
