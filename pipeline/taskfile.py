"""Tasks from outside, checked before anything is done: JSONL files, Python objects, bodies that came over plain NATS.

All three give the same messages, `field: what is wrong and how to mend it`. A file is read to its end before it is
accepted or refused, so that every bad line is named at once.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from rollyard.pipeline import codec
from rollyard.pipeline.fieldwords import TOO_DEEP, explain
from rollyard.pipeline.samplepolicy import policy_problems
from rollyard.schemas.errors import DecodeError, TaskError
from rollyard.schemas.task import MAX_PROMPT_BYTES, SCHEMA_VERSION, Task

Check = Callable[[Task], Iterable[str]]
"""Further checks that this package cannot make, for example of harness names. Each text: `field: what, how to mend`."""

SHOWN_PROBLEMS: Final = 20
_BOM: Final = b"\xef\xbb\xbf"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class TaskFile:
    """Accepted tasks in their order, each with an id, and how many more stood there with an id and content of these."""

    tasks: list[Task]
    repeated: int = 0


def read_task_file(path: str | Path, check: Check | None = None) -> TaskFile:
    """Read a JSONL file, one task a line. A byte order mark is accepted, blank lines are skipped.

    Raises TaskError that names up to 20 bad lines as `file:line: field: what, how to mend`, and counts the rest.
    """
    intake = _Intake(f"{path}:", "line", check)
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(_UTF16):
                    raise TaskError(f"{path}: the file is UTF-16", hint="save it as UTF-8")
                intake.line(number, line)
    except (OSError, ValueError) as error:
        if isinstance(error, TaskError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise TaskError(f"cannot read the task file {path}: {reason}", hint="is the path right?") from error
    if not intake.entries:
        raise TaskError(f"{path}: the file is empty", hint='write one task a line, at least {"prompt": "..."}')
    return intake.result()


def check_tasks(values: Iterable[Task | Mapping[str, Any]], check: Check | None = None) -> TaskFile:
    """The same for tasks made in Python; problems are named by position, from 1. Raises TaskError."""
    intake = _Intake("task ", "task", check)
    for number, value in enumerate(values, 1):
        intake.value(number, value)
    return intake.result()


def decode_task(data: bytes | str, check: Check | None = None) -> Task:
    """One task, JSON or msgpack (zstd or not), with an id. Raises TaskError that names each bad field."""
    body = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    task, problems = _decode(body, check)
    if task is None:
        raise TaskError("; ".join(problems))
    return task


@dataclass(slots=True)
class _Intake:
    """Collects tasks and problems over a whole file or list. An entry is a `line` or a `task`."""

    place: str
    entry: str
    check: Check | None
    tasks: list[Task] = field(default_factory=list)
    repeated: int = 0
    entries: int = 0
    bad_entries: int = 0
    problems: list[str] = field(default_factory=list)
    seen: dict[str, tuple[str, int]] = field(default_factory=dict)

    def line(self, number: int, line: bytes) -> None:
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            self._add(number, *_decode(line, self.check))

    def value(self, number: int, value: Task | Mapping[str, Any]) -> None:
        try:
            # Python's constructor checks nothing; the way through plain values does.
            plain = msgspec.to_builtins(value)
        except (TypeError, ValueError, RecursionError) as error:
            self._add(number, None, [f"holds what JSON cannot: {error}; use plain values only"])
        else:
            self._add(number, *_convert(plain, self.check))

    def _add(self, number: int, task: Task | None, problems: list[str]) -> None:
        self.entries += 1
        if task is not None:
            content = task.content_hash()
            known, first = self.seen.setdefault(task.id, (content, number))
            if first == number:
                self.tasks.append(task)
            elif known == content:
                self.repeated += 1
            else:
                before = f"{self.entry} {first}"
                problems = [f"id: {task.id!r} is used by {before} with other content; give one of them another id"]
        if problems:
            self.bad_entries += 1
            self.problems += [f"{self.place}{number}: {problem}" for problem in problems]

    def result(self) -> TaskFile:
        if not self.problems:
            return TaskFile(self.tasks, self.repeated)
        count = f"1 {self.entry} is" if self.bad_entries == 1 else f"{self.bad_entries} {self.entry}s are"
        shown = self.problems[:SHOWN_PROBLEMS]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more")
        raise TaskError("\n  ".join([f"{count} not acceptable, so nothing was submitted:", *shown]))


def _decode(data: bytes, check: Check | None) -> tuple[Task | None, list[str]]:
    """A task and no problems, or None and what is wrong."""
    # Blanks stand around text only: a compressed body may end with a byte that looks like one.
    is_text = not codec.content_type(data).endswith("zstd") and (data[:1] < b"\x80" or data.startswith(_BOM))
    body = data.removeprefix(_BOM).strip() if is_text else data
    if not body:
        return None, ['the task is empty; the least is {"prompt": "..."}']
    try:
        if codec.content_type(body).endswith("zstd") or (body[0] >= 0x80):
            return _convert(codec.decode(body, dict[str, Any]), check)
        return _convert(msgspec.json.decode(body), check)
    except DecodeError as error:
        return None, [f"neither JSON in UTF-8 nor msgpack: {error.message.partition(': ')[2]}"]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return None, [_explain_json(body, error)]


def _explain_json(body: bytes, error: Exception) -> str:
    """What is wrong with a JSON text; the standard library says it better than the fast parser."""
    try:
        text = body.decode()
        json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as bad:
        return f"not UTF-8: byte {bad.object[bad.start]:#04x} at position {bad.start}; save it as UTF-8"
    except json.JSONDecodeError as bad:
        what = bad.msg.removesuffix(" at")
        return f"malformed JSON: {what} at column {bad.pos + 1}; a task is one whole JSON object on one line"
    except RecursionError:
        return f"malformed JSON: {TOO_DEEP}"
    except ValueError as bad:
        return f"malformed JSON: {bad}"
    if _SURROGATE.search(text):
        return "malformed JSON: half of a surrogate pair (\\ud800 to \\udfff) is no text; write the character itself"
    return f"malformed JSON: {str(error).partition(' - at ')[0]}; correct the value"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number; write null or leave the field out")


def _convert(raw: Any, check: Check | None) -> tuple[Task | None, list[str]]:
    if isinstance(raw, Mapping):
        version = raw.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            return None, [
                f"schema_version: {version} is newer than {SCHEMA_VERSION}, the newest that this release reads; "
                "upgrade Rollyard"
            ]
    try:
        task = msgspec.convert(raw, Task, from_attributes=False)
    except (msgspec.ValidationError, RecursionError) as error:
        return None, [explain(error, raw, Task)]
    problems = [*_content_problems(task), *(check(task) if check else ())]
    return (None, problems) if problems else (task.with_id(), [])


def _content_problems(task: Task) -> list[str]:
    """What no type can say."""
    problems = [*_prompt_problems(task.prompt), *_file_problems(task.sandbox.files)]
    if task.samples is not None:
        problems += policy_problems(task.samples, "samples.")
    for name, value in task.sandbox.env.items():
        if not name or "=" in name or "\0" in name + value:
            problems.append(
                f"sandbox.env: {name!r} cannot be set; no name is empty or holds '=', and no text holds NUL"
            )
    if any("\0" in step.run for step in task.sandbox.steps()):
        problems.append("sandbox.setup: a command holds a NUL character; remove it")
    if not problems:
        try:
            task.content_hash()
            codec.encode((task.metadata, task.agent.args, task.evaluation.args))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            problems.append(f"metadata or args: cannot be stored: {error}; use plain values and 64-bit integers only")
    return problems


def _prompt_problems(prompt: str) -> list[str]:
    try:
        size = len(prompt.encode())
    except UnicodeEncodeError:
        return ["prompt: holds half of a surrogate pair, which is no text; replace the character"]
    if size > MAX_PROMPT_BYTES:
        limit = f"{MAX_PROMPT_BYTES:,} bytes ({MAX_PROMPT_BYTES // 1_000_000} MB)"
        return [f"prompt: has {size:,} bytes, the limit is {limit}; put large inputs into sandbox.files"]
    return []


def _file_problems(files: Mapping[str, str]) -> list[str]:
    problems: list[str] = []
    plain: dict[str, str] = {}
    for path in files:
        normal = posixpath.normpath(path) if path else "."
        if path.startswith("/") or normal == ".." or normal.startswith("../"):
            problems.append(f"sandbox.files: {path!r} leaves the sandbox; use a path inside the working directory")
        elif normal == "." or path.endswith("/") or "\0" in path:
            problems.append(f"sandbox.files: {path!r} names no file; write for example 'src/main.py'")
        elif normal in plain:
            problems.append(f"sandbox.files: {path!r} and {plain[normal]!r} are the same file; keep one")
        else:
            plain[normal] = path
    for normal, path in plain.items():
        above = next((str(up) for up in Path(normal).parents if str(up) in plain), None)
        if above is not None:
            problems.append(f"sandbox.files: {plain[above]!r} is a file and the folder of {path!r}; rename one")
    return problems
