"""What rules that compare texts share: the accepted answers, and how texts are made comparable."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollyard.stages.evaluator import RuleArgs


class Answers(RuleArgs, frozen=True, kw_only=True):
    """Accepted answers: `answer`, or several `answers`, of which any one will do."""

    answer: Annotated[str | None, Meta(description="the accepted answer")] = None
    answers: Annotated[tuple[str, ...], Meta(description="accepted answers")] = ()
    ignore_case: Annotated[bool, Meta(description="upper and lower case are the same")] = False
    strip: Annotated[bool, Meta(description="ignore white space at both ends")] = True

    def __post_init__(self) -> None:
        if not self.accepted():
            raise ValueError("give `answer` or `answers`")
        if "" in self.accepted():
            raise ValueError("an accepted answer is empty")

    def accepted(self) -> tuple[str, ...]:
        """The accepted answers in comparable form."""
        given = self.answers if self.answer is None else (self.answer, *self.answers)
        return tuple(self.comparable(text) for text in given)

    def comparable(self, text: str) -> str:
        """`text` without the differences that do not count."""
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
