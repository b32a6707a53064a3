"""Rows as of SWE-bench, made into tasks: a repository at a commit, an issue, and the tests that are to pass."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollyard.pipeline.importers.imported import Collected, Converted, Progress
from rollyard.pipeline.importers.rows import Row, list_of, read_rows, text_of
from rollyard.schemas.sandbox import Repository, SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task, Timeouts

PROMPT: Final = """\
The repository {repo} is in the present directory. This issue was filed against it:

{problem_statement}

Change the code so that the issue is solved. Tests for it will be run afterwards; you need not change tests.
"""
IMAGE_COLUMNS: Final = ("image", "image_name", "docker_image")
REPORT_EVERY: Final = 1_000
_APPLY: Final = 'base64 -d >"$HOME/gold.patch" && git apply -v "$HOME/gold.patch"'
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweOptions:
    """What every task gets. Templates are filled from the row's columns: {instance_id}, {repo}, {base_commit}, ..."""

    sandbox: SandboxSpec
    image: str = ""
    """Template of the image's name; empty: the row's own column, image, image_name or docker_image."""
    clone: str = ""
    """Template of the repository's URL; empty: the image has it, in sandbox.workdir."""
    prompt: str = PROMPT
    command: str = ""
    prepare: str = ""
    report: str = ""
    agent: AgentSpec = AgentSpec(harness="bash")
    oracle: bool = False
    """The agent is the row's own patch: to see that the tests judge it as solved."""
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(run_s=1800.0, eval_s=1800.0))
    group_size: int = 1
    data_source: str = "swe"


def import_swe(path: Path, options: SweOptions, progress: Progress = lambda count: None) -> Collected:
    """Every row of a file. Raises TaskError for a file that cannot be read."""
    collected = Collected()
    for count, (number, row) in enumerate(read_rows(path), 1):
        collected.add(f"{path}:{number}", Converted(problems=[row]) if isinstance(row, str) else swe_task(row, options))
        if count % REPORT_EVERY == 0:
            progress(count)
    if not collected.tasks and not collected.bad:
        collected.add(str(path), Converted(problems=["the file has no rows"]))
    return collected


def swe_task(row: Row, options: SweOptions) -> Converted:
    """The task of one row."""
    problems: list[str] = []
    texts: dict[str, str] = {}
    for column in ("instance_id", "repo", "base_commit", "problem_statement", "test_patch"):
        try:
            texts[column] = text_of(row, column)
            if not texts[column].strip() and column != "test_patch":
                raise ValueError(f"{column}: is empty")
        except ValueError as error:
            problems.append(str(error))
    tests: dict[str, list[str]] = {}
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        try:
            tests[column] = _tests(row, column)
        except ValueError as error:
            problems.append(str(error))
    if "FAIL_TO_PASS" in tests and not tests["FAIL_TO_PASS"]:
        problems.append("FAIL_TO_PASS: is empty, so that nothing would tell whether the issue is solved")
    agent = options.agent
    if options.oracle:
        try:
            agent = _oracle(text_of(row, "patch"))
        except ValueError as error:
            problems.append(str(error))
    image = _filled(options.image, row) or next((str(row[name]) for name in IMAGE_COLUMNS if row.get(name)), "")
    if not image and not options.clone and not options.sandbox.image:
        problems.append("image: there is none; give --image with a template, or --clone for an image that has git")
    if problems:
        return Converted(problems=problems)
    return Converted(_task(row, options, texts, tests, (image, agent)))


def _task(
    row: Row,
    options: SweOptions,
    texts: Mapping[str, str],
    tests: Mapping[str, list[str]],
    place: tuple[str, AgentSpec],
) -> Task:
    spec, (image, agent) = options.sandbox, place
    repository = None
    if options.clone:
        repository = Repository(url=_filled(options.clone, row), commit=texts["base_commit"])
    args: dict[str, Any] = {
        "fail_to_pass": tests["FAIL_TO_PASS"],
        "pass_to_pass": tests["PASS_TO_PASS"],
        "test_patch": texts["test_patch"],
    }
    args |= {name: text for name in ("command", "prepare", "report") if (text := getattr(options, name))}
    return Task(
        prompt=_filled(options.prompt, row),
        id=texts["instance_id"],
        agent=agent,
        sandbox=SandboxSpec(
            backend=spec.backend,
            image=image or spec.image,
            workdir=spec.workdir,
            user=spec.user,
            network=spec.network,
            limits=spec.limits,
            env=spec.env,
            repository=repository,
        ),
        evaluation=EvaluationSpec(rule="swe", args=args),
        timeouts=options.timeouts,
        group_size=options.group_size,
        data_source=options.data_source,
        # What solves the issue is not among it: agents may see metadata in samples, and files of tasks.
        metadata={name: row[name] for name in ("repo", "base_commit", "version", "difficulty") if row.get(name)},
    )


def _tests(row: Row, column: str) -> list[str]:
    if column == "PASS_TO_PASS" and row.get(column) is None:
        return []
    found = list_of(row, column)
    if not all(isinstance(name, str) and name for name in found):
        raise ValueError(f"{column}: holds what is no test id: {json.dumps(found, default=str)[:60]}")
    return found


def _oracle(patch: str) -> AgentSpec:
    packed = b64encode(patch.encode()).decode()
    return AgentSpec(harness="command", args={"command": ["sh", "-c", _APPLY], "stdin": packed})


def _filled(template: str, row: Row) -> str:
    """A template with the texts of columns; what names no column of text stays as it is."""

    def column(match: re.Match[str]) -> str:
        value = row.get(match[1])
        return value if isinstance(value, str) else match[0]

    return _PLACEHOLDER.sub(column, template)
