"""Rule `choice`: 1 when the answer picks the right option of a multiple-choice question, else 0."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta

from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict

_BOXED: Final = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_WRAPPER: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|operatorname)\s*\{([^{}]*)\}")
_MARKUP: Final = re.compile(r"[*_`$]+|\\[()\[\]]")
_STATEMENT: Final = re.compile(
    r"\b(?:final\s+answer|correct\s+(?:answer|option|choice)|answer|option|choice)"
    r"(?:\s+(?:is|would\s+be|should\s+be|must\s+be))?\s*[:=\-]?\s*(?:is\s+)?(?:option|choice|answer)?\s*[:=]?\s*",
    re.IGNORECASE,
)
_NOT: Final = re.compile(r"\b(?:not|isn't|never|neither|cannot be|can't be)\s*\Z", re.IGNORECASE)
_BETWEEN: Final = re.compile(r"\s*(?:,|/|&|\bor\b|\band\b|,\s*or\b|,\s*and\b)\s*", re.IGNORECASE)


class Choice(RuleArgs, frozen=True, kw_only=True):
    """Looks for the option that the answer settles on: in \\boxed{}, in "the answer is (B)", on a line of its own, by
    its text. Where it names several equally, it has picked none: that is 0, and the metric `ambiguous`.
    """

    answer: Annotated[str, Meta(min_length=1, description="label of the right option, or its text")]
    options: Annotated[
        tuple[str, ...], Meta(max_length=26, description="texts of the options, in the order of labels")
    ] = ()
    labels: Annotated[str, Meta(min_length=2, max_length=26, description="the labels, one character each")] = (
        string.ascii_uppercase
    )

    def __post_init__(self) -> None:
        if len(set(self.labels.upper())) != len(self.labels):
            raise ValueError("`labels` names a label twice")
        if len(self.options) > len(self.labels):
            raise ValueError(f"`options` has {len(self.options)} texts, `labels` only {len(self.labels)} labels")
        if len({_plain(option) for option in self.options}) != len(self.options):
            raise ValueError("`options` has a text twice")
        if self._right() is None:
            raise ValueError(f"`answer` {self.answer!r} is no label, and the text of no option")

    async def reward(self, context: EvalContext) -> Verdict:
        """1.0 or 0.0; 0.0 also when nothing, or no one thing, is picked."""
        picked = self.picked(context.result.answer)
        right = self._right()
        return Verdict(float(picked == {right}), {"found": float(bool(picked)), "ambiguous": float(len(picked) > 1)})

    def picked(self, text: str) -> set[str]:
        """The labels that an answer settles on: none, one, or several that stand there equally."""
        for look in (self._boxed, self._stated, self._alone, self._by_text, self._mentioned):
            if found := look(text):
                return found
        return set()

    def _known(self) -> str:
        upper = self.labels.upper()
        return upper[: len(self.options)] if self.options else upper

    def _right(self) -> str | None:
        label = self.answer.strip().strip("().").upper()
        if len(label) == 1 and label in self._known():
            return label
        return next((name for name, text in self._texts() if _plain(text) == _plain(self.answer)), None)

    def _texts(self) -> Iterable[tuple[str, str]]:
        return zip(self._known(), self.options, strict=False)

    def _boxed(self, text: str) -> set[str]:
        found = _BOXED.findall(text)
        return self._pick_of(found[-1]) if found else set()

    def _stated(self, text: str) -> set[str]:
        """The last `answer is ...` that names a label."""
        text = _unmarked(text)
        for match in reversed(list(_STATEMENT.finditer(text))):
            if _NOT.search(text[: match.start()]):
                continue
            if labels := self._labels_at(text, match.end()):
                return labels
            if named := self._named_in(text[match.end() :].partition("\n")[0], whole=True):
                return named
        return set()

    def _alone(self, text: str) -> set[str]:
        """The last line, or the first, when it is a label, bare or before its option."""
        lines = [line.strip() for line in _unmarked(text).splitlines() if line.strip()]
        for line in (*lines[-1:], *lines[:1]):
            if found := self._pick_of(line):
                return found
        return set()

    def _by_text(self, text: str) -> set[str]:
        lines = [line for line in _unmarked(text).splitlines() if line.strip()]
        return self._named_in(lines[-1]) if lines else set()

    def _mentioned(self, text: str) -> set[str]:
        """Labels in brackets anywhere, else options by their text anywhere."""
        known = re.escape(self._known())
        bracketed = re.findall(rf"[(\[]\s*([{known}])\s*[)\]]", _unmarked(text))
        return set(bracketed) or self._named_in(_unmarked(text))

    def _pick_of(self, text: str) -> set[str]:
        """What a short text picks that is nothing but a pick: `B`, `(B)`, `B. Paris`, `B or C`, `Paris`."""
        text = _unmarked(_WRAPPER.sub(r"\1", text)).strip()
        known = re.escape(self._known())
        if re.fullmatch(rf"[(\[]?\s*[{known}]\s*[)\]]?\s*[.:]?", text, re.IGNORECASE):
            return {re.sub(r"[^\w]", "", text).upper()}
        if match := re.match(rf"[(\[]?([{known}])(?:[)\]]|[.:)])\s+(\S.*)", text, re.DOTALL):
            option = dict(self._texts()).get(match[1])
            if option is None or _plain(option) == _plain(match[2]):
                return {match[1]}
        labels = _BETWEEN.split(text)
        if len(labels) > 1 and all(re.fullmatch(rf"[(\[]?[{known}][)\]]?\.?", label) for label in labels):
            return {re.sub(r"[^\w]", "", label) for label in labels}
        return self._named_in(text, whole=True)

    def _labels_at(self, text: str, start: int) -> set[str]:
        """Labels that begin at `start`: one, or several in a row."""
        one = re.compile(rf"[(\[]?\s*([{re.escape(self._known())}])\s*[)\]]?(?![\w'])")
        found: set[str] = set()
        while match := one.match(text, start):
            # "the answer is A very long one": an article, unless it is marked, or ends there.
            if match[1] in "AI" and match[0].strip() in ("A", "I") and re.match(r"\s*[a-z]", text[match.end() :]):
                joined = _BETWEEN.match(text, match.end())
                if joined is None or one.match(text, joined.end()) is None:
                    break
            found.add(match[1])
            between = _BETWEEN.match(text, match.end())
            if between is None:
                break
            start = between.end()
        return found

    def _named_in(self, text: str, *, whole: bool = False) -> set[str]:
        """Options whose text stands in `text`, or is all of it; not those inside a longer one that stands there."""
        plain = _plain(text)
        named = [
            (label, _plain(option))
            for label, option in self._texts()
            if (plain == _plain(option) if whole else _stands_in(_plain(option), plain))
        ]
        return {
            label
            for label, option in named
            if not any(option != other and _stands_in(option, other) for _, other in named)
        }


def _unmarked(text: str) -> str:
    """Without Markdown's emphasis and the signs of inline mathematics."""
    return _MARKUP.sub("", text)


def _plain(text: str) -> str:
    """A text as options are compared by: case, blanks, markup and the end's punctuation do not count."""
    return " ".join(_unmarked(_WRAPPER.sub(r"\1", text)).split()).strip(" .,:;!?\"'()").casefold()


def _stands_in(part: str, whole: str) -> bool:
    return bool(part) and re.search(rf"(?<!\w){re.escape(part)}(?!\w)", whole) is not None
