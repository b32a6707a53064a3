"""`rollyard tasks import`: tasks made of folders in Harbor's format, of tables, and of rows as of SWE-bench."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli.common import Commands, command, json_flag, to_json

if TYPE_CHECKING:
    from rollyard.pipeline.importers.imported import Collected
    from rollyard.schemas.task import AgentSpec, Task

NETWORKS = ("default", "gateway", "none", "allow", "open")


def add(commands: Commands) -> None:
    """The commands of this file."""
    tasks = command(commands, "tasks", run_help, "make task files")
    kinds = tasks.add_subparsers(title="what", metavar="WHAT", required=True)
    imports = command(kinds, "import", run_help, "make tasks of what others call tasks")
    formats = imports.add_subparsers(title="formats", metavar="FORMAT", required=True)
    _add_harbor(formats)
    _add_table(formats)
    _add_swe(formats)


def _add_harbor(formats: Commands) -> None:
    harbor = command(formats, "harbor", run_harbor, "task folders in Harbor's format")
    harbor.add_argument("folders", metavar="DIR", type=Path, nargs="+", help="a task's folder, or one that holds some")
    _common(harbor, backend="docker", harness="bash")
    harbor.add_argument("--image", metavar="NAME", default="", help="image of all, instead of their own")
    harbor.add_argument("--network", choices=NETWORKS, help="instead of what the tasks say")
    harbor.add_argument(
        "--tests-in",
        choices=("same", "fresh"),
        help="sandbox that tests run in (default: as the task says, or fresh)",
    )
    harbor.add_argument(
        "--ignore", metavar="FIELD", action="append", default=[], help="leave out what cannot be kept; may be repeated"
    )
    harbor.add_argument(
        "--stand-in", choices=("oracle", "nothing"), default="", help="the task's own solution, or nobody, as the agent"
    )


def _add_table(formats: Commands) -> None:
    table = command(formats, "table", run_table, "JSONL or Parquet with a question and an answer in each row")
    table.add_argument("file", metavar="FILE", type=Path, help="Parquet when it is called so, else JSON Lines")
    table.add_argument("--prompt", metavar="COLUMN", required=True, help="the question")
    table.add_argument("--answer", metavar="COLUMN", required=True, help="the right answer; a list for several")
    table.add_argument("--rule", metavar="NAME", required=True, help="math, exact, choice, numeric, code or another")
    table.add_argument("--id", metavar="COLUMN", default="", help="the task's id (default: made from the content)")
    table.add_argument("--options", metavar="COLUMN", default="", help="options of a multiple-choice question")
    table.add_argument("--index-from", type=int, choices=(0, 1), default=0, help="what a number as answer counts from")
    table.add_argument("--answer-after", metavar="TEXT", default="", help="the answer is what follows the last TEXT")
    table.add_argument(
        "--template", metavar="TEXT", default="{prompt}", help="what the agent is asked, with {prompt} in it"
    )
    table.add_argument(
        "--arg", metavar="NAME=JSON", action="append", default=[], help="further argument of the rule; may be repeated"
    )
    table.add_argument("--metadata", metavar="COLUMN", action="append", default=[], help="column kept in the metadata")
    _common(table, backend="local", harness="ask")


def _add_swe(formats: Commands) -> None:
    swe = command(formats, "swe", run_swe, "rows as of SWE-bench, JSONL or Parquet")
    swe.add_argument("file", metavar="FILE", type=Path, help="Parquet when it is called so, else JSON Lines")
    _common(swe, backend="docker", harness="bash")
    swe.add_argument("--image", metavar="TEMPLATE", default="", help="image of each, for example NAME:{instance_id}")
    swe.add_argument("--clone", metavar="TEMPLATE", default="", help="URL of each repository, with {repo} in it")
    swe.add_argument("--workdir", metavar="DIR", default="", help="where the image has the repository")
    swe.add_argument("--command", dest="test_command", metavar="TEXT", default="", help="runs {files} or {tests}")
    swe.add_argument("--prepare", metavar="TEXT", default="", help="shell commands before it, in the same shell")
    swe.add_argument("--report", choices=("pytest", "unittest"), default="", help="what it prints (default: pytest)")
    swe.add_argument("--network", choices=NETWORKS, default="default", help="what the agent can reach")
    swe.add_argument("--oracle", action="store_true", help="the row's own patch as the agent")


def _common(parser: argparse.ArgumentParser, *, backend: str, harness: str) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to (default: standard output)")
    parser.add_argument("--check", action="store_true", help="write nothing, say only what would be written")
    parser.add_argument("--backend", metavar="NAME", default=backend, help=f"sandbox backend (default: {backend})")
    parser.add_argument("--harness", metavar="NAME", default=harness, help=f"the agent (default: {harness})")
    parser.add_argument("--model", metavar="NAME", default="default", help="served model (default: default)")
    parser.add_argument("--group-size", metavar="N", type=int, default=1, help="rollouts of each task (default: 1)")
    json_flag(parser)


def run_help(args: argparse.Namespace) -> int:
    """Never called: what follows is required."""
    raise NotImplementedError(args)


def run_harbor(args: argparse.Namespace) -> int:
    """Import task folders."""
    from rollyard.pipeline.importers.harbor import HarborOptions, import_harbor
    from rollyard.stages.sandbox import BACKENDS

    able = BACKENDS.load(args.backend).capabilities
    options = HarborOptions(
        backend=args.backend,
        isolated=able.isolated,
        builds=able.builds,
        images=able.images,
        workdirs=able.workdirs,
        users=able.users,
        networks=able.networks,
        limits=frozenset(name for name, _ in able.limits),
        image=args.image,
        network=args.network,
        sandbox=args.tests_in,
        ignore=frozenset(args.ignore),
        agent=_agent(args),
        stand_in=args.stand_in,
        group_size=args.group_size,
    )
    return _write(args, lambda told: import_harbor(args.folders, options, told))


def run_table(args: argparse.Namespace) -> int:
    """Import questions."""
    from rollyard.pipeline.importers.table import TableOptions, import_table
    from rollyard.schemas.errors import ConfigError
    from rollyard.schemas.sandbox import SandboxSpec
    from rollyard.stages.evaluator import RULES

    RULES.load(args.rule)
    if "{prompt}" not in args.template:
        raise ConfigError("--template: there is no {prompt} in it", hint="say where the question stands")
    options = TableOptions(
        prompt=args.prompt,
        answer=args.answer,
        rule=args.rule,
        identity=args.id,
        options=args.options,
        index_from=args.index_from,
        answer_after=args.answer_after,
        template=args.template,
        args=dict(map(_argument, args.arg)),
        metadata=tuple(args.metadata),
        agent=_agent(args),
        sandbox=SandboxSpec(backend=args.backend),
        group_size=args.group_size,
        data_source=args.file.stem,
    )
    return _write(args, lambda told: import_table(args.file, options, told))


def run_swe(args: argparse.Namespace) -> int:
    """Import rows as of SWE-bench."""
    from rollyard.pipeline.importers.swe import SweOptions, import_swe
    from rollyard.schemas.sandbox import SandboxSpec

    options = SweOptions(
        sandbox=SandboxSpec(backend=args.backend, workdir=args.workdir, network=args.network),
        image=args.image,
        clone=args.clone,
        command=args.test_command,
        prepare=args.prepare,
        report=args.report,
        agent=_agent(args),
        oracle=args.oracle,
        group_size=args.group_size,
        data_source=args.file.stem,
    )
    return _write(args, lambda told: import_swe(args.file, options, told))


def _agent(args: argparse.Namespace) -> AgentSpec:
    from rollyard.schemas.task import AgentSpec

    return AgentSpec(harness=args.harness, model=args.model)


def _argument(text: str) -> tuple[str, Any]:
    """`name=JSON`; what is no JSON is text."""
    import json

    from rollyard.schemas.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--arg: {text!r} is no NAME=VALUE", hint="write for example --arg digits=4")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _write(args: argparse.Namespace, read: Callable[[Callable[[int], None]], Collected]) -> int:
    """Read everything, check it, and write it whole or not at all."""
    from rollyard.stages.plugin_check import check_task

    live = sys.stderr.isatty()

    def told(count: int) -> None:
        print(f"\r{count:,} read" if live else f"{count:,} read", end="" if live else "\n", file=sys.stderr, flush=True)

    collected = read(told)
    tasks = collected.result(check_task)
    for note, count in Counter(note.partition(": ")[2] for note in collected.notes).items():
        print(f"note: {note}" + (f" ({count} tasks)" if count > 1 else ""), file=sys.stderr)
    lines = "".join(f"{to_json(task)}\n" for task in tasks)
    if not args.check and args.output is None:
        sys.stdout.write(lines)
        return 0
    if not args.check:
        _put(args.output, lines)
    _say(args, tasks, collected.notes)
    return 0


def _put(path: Path, text: str) -> None:
    """A file that appears whole."""
    from rollyard.schemas.errors import SetupError

    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(text)
        aside.replace(path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}", hint="is its folder there?") from error


def _say(args: argparse.Namespace, tasks: list[Task], notes: list[str]) -> None:
    rollouts = sum(task.group_size for task in tasks)
    where = str(args.output) if args.output is not None and not args.check else ""
    if args.json:
        print(to_json({"tasks": len(tasks), "rollouts": rollouts, "file": where, "notes": notes}))
        return
    noun = "task" if len(tasks) == 1 else "tasks"
    wrote = f"written to {where}" if where else "could be written"
    print(f"{len(tasks)} {noun}, {rollouts} rollouts, {wrote}.")
