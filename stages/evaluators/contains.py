"""Rule `contains`: 1 when an accepted answer stands in the answer, else 0."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from rollyard.stages.evaluator import EvalContext, Verdict
from rollyard.stages.evaluators.answers import Answers


class Contains(Answers, frozen=True, kw_only=True):
    """Looks for any accepted answer, or for all of them."""

    all: Annotated[bool, Meta(description="all of `answers` must be there, not only one")] = False
    word: Annotated[bool, Meta(description="as a word of its own: 5 is not in 15")] = False

    async def reward(self, context: EvalContext) -> Verdict:
        """1.0 or 0.0."""
        text = self.comparable(context.result.answer)
        found = [self._stands_in(text, wanted) for wanted in self.accepted()]
        return Verdict(float(all(found) if self.all else any(found)))

    def _stands_in(self, text: str, wanted: str) -> bool:
        if not self.word:
            return wanted in text
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) is not None
