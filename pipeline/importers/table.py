"""Questions with answers, one a row, made into tasks: mathematics, multiple choice, code, anything with an answer."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rollyard.pipeline.importers.imported import Collected, Converted, Progress
from rollyard.pipeline.importers.rows import Row, kind_of, list_of, read_rows, text_of, value_of
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task

PROMPT_MARK: Final = "{prompt}"
REPORT_EVERY: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """Which columns mean what, and what every task gets."""

    prompt: str
    answer: str
    rule: str
    identity: str = ""
    options: str = ""
    """Column with the options of a multiple-choice question: a list, or an object of label and text."""
    index_from: int = 0
    """What a number in the answer column counts options from."""
    answer_after: str = ""
    """The answer is what stands behind the last of these, as `####` in some sets of school mathematics."""
    template: str = PROMPT_MARK
    args: Mapping[str, Any] = field(default_factory=dict)
    metadata: tuple[str, ...] = ()
    agent: AgentSpec = AgentSpec()
    sandbox: SandboxSpec = SandboxSpec()
    group_size: int = 1
    data_source: str = ""


def import_table(path: Path, options: TableOptions, progress: Progress = lambda count: None) -> Collected:
    """Every row of a file. Raises TaskError for a file that cannot be read."""
    collected = Collected()
    for count, (number, row) in enumerate(read_rows(path), 1):
        converted = Converted(problems=[row]) if isinstance(row, str) else table_task(row, options)
        collected.add(f"{path}:{number}", converted)
        if count % REPORT_EVERY == 0:
            progress(count)
    if not collected.tasks and not collected.bad:
        collected.add(str(path), Converted(problems=["the file has no rows"]))
    return collected


def table_task(row: Row, options: TableOptions) -> Converted:
    """The task of one row."""
    problems: list[str] = []

    def taken(read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except ValueError as error:
            problems.append(str(error))
            return default

    prompt = taken(lambda: text_of(row, options.prompt), "")
    choices = taken(lambda: _choices(row, options.options), {}) if options.options else {}
    args = taken(lambda: rule_args(row, options, choices), {})
    kept = {name: taken(partial(value_of, row, name), None) for name in options.metadata}
    identity = taken(lambda: _identity(row, options.identity), "")
    if not prompt.strip() and not problems:
        problems.append(f"{options.prompt}: is empty")
    if problems:
        return Converted(problems=problems)
    if choices:
        prompt = "\n".join([prompt.rstrip(), "", *(f"{label}. {text}" for label, text in choices.items())])
    return Converted(
        Task(
            prompt=options.template.replace(PROMPT_MARK, prompt),
            id=identity,
            agent=options.agent,
            sandbox=options.sandbox,
            evaluation=EvaluationSpec(rule=options.rule, args={**args, **options.args}),
            group_size=options.group_size,
            data_source=options.data_source,
            metadata=kept,
        )
    )


def rule_args(row: Row, options: TableOptions, choices: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of the rule, from the answer column. Raises ValueError that names the column."""
    column = options.answer
    value = value_of(row, column)
    match options.rule:
        case "code":
            return {"cases": _cases(row, column)}
        case "choice":
            return _choice_args(value, options, choices)
        case "numeric":
            return {"answer": _number(value, options)}
        case "regex":
            return {"pattern": _answer_text(value, options)}
    if isinstance(value, list):
        return {"answers": [_answer_text(each, options) for each in value]}
    return {"answer": _answer_text(value, options)}


def _answer_text(value: Any, options: TableOptions) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{options.answer}: is {kind_of(value)}, not text or a number")
    text = value if isinstance(value, str) else f"{value:.17g}" if isinstance(value, float) else str(value)
    if options.answer_after:
        _, mark, text = text.rpartition(options.answer_after)
        if not mark:
            raise ValueError(f"{options.answer}: there is no {options.answer_after!r} in it")
    if not text.strip():
        raise ValueError(f"{options.answer}: is empty")
    return text.strip()


def _number(value: Any, options: TableOptions) -> float:
    text = _answer_text(value, options)
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise ValueError(f"{options.answer}: {text[:40]!r} is no number; try the rule math") from None


def _choice_args(value: Any, options: TableOptions, choices: Mapping[str, str]) -> dict[str, Any]:
    if isinstance(value, int) and not isinstance(value, bool) and choices:
        position = value - options.index_from
        if not 0 <= position < len(choices):
            raise ValueError(f"{options.answer}: {value} is none of {len(choices)} options from {options.index_from}")
        answer = list(choices)[position]
    else:
        answer = _answer_text(value, options)
    args: dict[str, Any] = {"answer": answer}
    if choices:
        args |= {"options": list(choices.values()), "labels": "".join(choices)}
    return args


def _choices(row: Row, column: str) -> dict[str, str]:
    """Label and text of each option."""
    value = value_of(row, column)
    if isinstance(value, Mapping):
        labels, texts = value.get("label"), value.get("text")
        if isinstance(labels, list) and isinstance(texts, list) and len(labels) == len(texts):
            found = dict(zip(map(str, labels), texts, strict=True))
        else:
            found = {str(label): text for label, text in value.items() if text is not None}
    else:
        listed = list_of(row, column)
        found = dict(zip(string.ascii_uppercase, listed, strict=False))
        if len(found) < len(listed):
            raise ValueError(f"{column}: has {len(listed)} options, at most 26 can be labelled")
    if len(found) < 2 or not all(isinstance(text, str) and text.strip() for text in found.values()):
        raise ValueError(f"{column}: needs at least two texts")
    if any(len(label) != 1 for label in found):
        raise ValueError(f"{column}: labels are single characters, here they are {', '.join(found)[:60]}")
    return found


def _cases(row: Row, column: str) -> list[dict[str, Any]]:
    """Cases as the rule `code` has them: a list of them, or inputs and outputs in two lists."""
    value = value_of(row, column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{column}: is text that is no JSON: {value[:60]!r}") from None
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"{column}: needs lists `inputs` and `outputs` of the same length")
        value = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(value, list) or not value or not all(isinstance(case, Mapping) for case in value):
        raise ValueError(f"{column}: is no list of cases such as {{'input': '1 2', 'output': '3'}}")
    return [{name: part for name, part in case.items() if part is not None} for case in value]


def _identity(row: Row, column: str) -> str:
    if not column:
        return ""
    value = value_of(row, column)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"{column}: is {kind_of(value)}, no id; ids are text or whole numbers")
    return str(value)
