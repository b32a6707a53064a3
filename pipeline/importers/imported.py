"""What an import gives: tasks, or everything that stands in their way, named at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollyard.pipeline.taskfile import SHOWN_PROBLEMS, Check, check_tasks
from rollyard.schemas.errors import TaskError
from rollyard.schemas.task import Task

Progress = Callable[[int], None]
"""Told how many entries were read so far."""


@dataclass(frozen=True, slots=True)
class Converted:
    """One entry: its task, or problems as `field: what; how to mend it`. Notes are for people, and stop nothing."""

    task: Task | None = None
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(slots=True)
class Collected:
    """What entries were made into. `place` of an entry is its path, or file and row."""

    tasks: list[Task] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: int = 0

    def add(self, place: str, converted: Converted) -> None:
        """Take one entry in."""
        self.notes += [f"{place}: {note}" for note in converted.notes]
        if converted.problems or converted.task is None:
            self.bad += 1
            self.problems += [f"{place}: {problem}" for problem in converted.problems]
            return
        self.tasks.append(converted.task)
        self.places.append(place)

    def result(self, check: Check | None = None) -> list[Task]:
        """The tasks, each with an id, checked as a task file is. Raises TaskError that names what is wrong by place."""
        ids: dict[str, str] = {}
        for task, place in zip(self.tasks, self.places, strict=True):
            for problem in _problems(task, check):
                self.problems.append(f"{place}: {problem}")
            if task.id and task.id in ids:
                self.problems.append(f"{place}: id: {task.id!r} is the id of {ids[task.id]} too; name another column")
            ids.setdefault(task.id, place)
        if not self.problems:
            return [task.with_id() for task in self.tasks]
        shown = self.problems[:SHOWN_PROBLEMS]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more")
        raise TaskError("\n  ".join(["not everything can be imported, so nothing was written:", *shown]))


def _problems(task: Task, check: Check | None) -> Iterable[str]:
    try:
        check_tasks([task], check)
    except TaskError as error:
        for line in error.message.splitlines()[1:]:
            yield line.strip().partition(": ")[2]
