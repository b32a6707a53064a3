"""What a trainer does, from the shell: submit, status, cancel."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.cli.common import (
    Commands,
    check_run,
    command,
    config_of,
    connected,
    json_flag,
    run_async,
    to_json,
)

if TYPE_CHECKING:
    from rollyard.pipeline.bus import Bus
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.progress import RunStatus
    from rollyard.pipeline.tokenmeter import TokenMeter
    from rollyard.schemas.policy import SamplePolicy
    from rollyard.schemas.task import Task

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.5
LOOK_BACK_S = 30.0
WORKERS_WAIT_S = 2.0


def add(commands: Commands) -> None:
    """The commands of this file."""
    submit = command(commands, "submit", run_submit, "check a task file and publish its tasks")
    submit.add_argument("file", metavar="FILE", help="JSONL, one task a line; - reads standard input")
    submit.add_argument("--run", dest="run_name", metavar="RUN", help="name of the run")
    submit.add_argument("--check", action="store_true", help="only check the file")
    submit.add_argument(
        "--evaluation", action="store_true", help="a new run may use model servers that return no token ids"
    )
    submit.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="sample policy of a new run, TOML or JSON; a task's own goes before",
    )
    json_flag(submit)
    status = command(commands, "status", run_status, "show how far runs are")
    status.add_argument("--run", dest="run_name", metavar="RUN", help="only this run (default: all)")
    status.add_argument("--follow", action="store_true", help="go on until everything is delivered, or Ctrl-C")
    json_flag(status)
    cancel = command(commands, "cancel", run_cancel, "end a run, a task or one rollout")
    cancel.add_argument("--run", dest="run_name", required=True, metavar="RUN", help="name of the run")
    cancel.add_argument("--task", metavar="ID", help="only this task")
    cancel.add_argument("--index", type=int, metavar="N", help="only this rollout of the task")
    cancel.add_argument("--reason", default="cancelled from the command line", help="what the samples will say")


def run_submit(args: argparse.Namespace) -> int:
    """Check the whole file, then publish."""
    from rollyard.pipeline.samplepolicy import read_policy
    from rollyard.pipeline.taskfile import read_task_file
    from rollyard.schemas.errors import ConfigError
    from rollyard.stages.plugin_check import check_task

    path = Path("/dev/stdin" if args.file == "-" else args.file)
    policy = read_policy(args.samples) if args.samples else None
    tasks = read_task_file(path, check_task)
    if args.check:
        rollouts = sum(task.group_size for task in tasks.tasks)
        report = {"tasks": len(tasks.tasks), "repeated": tasks.repeated, "rollouts": rollouts}
        print(to_json(report) if args.json else f"{path}: {len(tasks.tasks)} tasks, {rollouts} rollouts, no errors")
        return 0
    if not args.run_name:
        raise ConfigError("submit needs the name of a run", hint="add --run NAME")
    return run_async(_submit(args, config_of(args), tasks.tasks, policy))


async def _submit(args: argparse.Namespace, config: Config, tasks: list[Task], policy: SamplePolicy | None) -> int:
    from rollyard.pipeline.client import Client
    from rollyard.pipeline.pools import not_offered, offer_hint

    async with connected(config) as bus:
        client = Client(bus, args.run_name, training=not args.evaluation, samples=policy)
        report = await client.submit(tasks)
        missing = await not_offered(bus, {task.sandbox.backend for task in tasks}, WORKERS_WAIT_S)
    if args.json:
        print(to_json({"run": args.run_name, "accepted": report.accepted, "repeated": report.repeated}))
    else:
        repeated = f", {report.repeated} were there already" if report.repeated else ""
        noun = "task" if report.accepted == 1 else "tasks"
        print(f"{report.accepted} {noun} published to run {args.run_name}{repeated}.")
    if missing:
        what = f"no worker offers the sandbox backend {', '.join(missing)} now, so tasks with it wait"
        print(f"warning: {what}\n  fix: {offer_hint(missing)}", file=sys.stderr)
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Show snapshots; with --follow, until everything is delivered."""
    return run_async(_status(args, config_of(args)))


async def _status(args: argparse.Namespace, config: Config) -> int:
    async with connected(config) as bus:
        if args.run_name:
            await check_run(bus, args.run_name)
        if args.follow:
            await follow(bus, args.run_name, as_json=args.json)
            await written(bus, config)
            return 0
        statuses = await snapshots(bus, args.run_name)
        if not statuses and not args.json:
            print("There are no runs. `rollyard submit FILE --run NAME` begins one.")
        for status in statuses:
            print(to_json(status) if args.json else _render(status, None, 0.0, live=sys.stdout.isatty()))
    return 0


async def snapshots(bus: Bus, run: str | None, meter: TokenMeter | None = None) -> list[RunStatus]:
    """The state of one run, or of every run that has tasks. `meter` counts the tokens of that one run."""
    from rollyard.pipeline.kv import Bucket
    from rollyard.pipeline.progress import run_status as snapshot
    from rollyard.schemas import subjects
    from rollyard.schemas.fleet import Run

    runs = [run] if run else [found.run async for _, found, _ in Bucket[Run](bus, subjects.RUNS, Run).items()]
    tokens = await meter.count() if meter else None
    return [await snapshot(bus, name, tokens=tokens) for name in runs]


async def follow(bus: Bus, run: str | None, *, as_json: bool = False, meter: TokenMeter | None = None) -> None:
    """Show progress until everything is delivered: in place on a terminal, else a line from time to time."""
    live = sys.stdout.isatty() and not as_json
    every_s = LIVE_EVERY_S if live else PLAIN_EVERY_S
    looks: dict[str, deque[tuple[RunStatus, float]]] = defaultdict(lambda: deque(maxlen=round(LOOK_BACK_S / every_s)))
    drawn, said = 0, ""
    while True:
        statuses = await snapshots(bus, run, meter)
        now = time.monotonic()
        if as_json:
            print("\n".join(map(to_json, statuses)), flush=True)
        else:
            lines = []
            for status in statuses:
                # Rates over several looks: those between two jump about.
                looks[status.run].append((status, now))
                start, at = looks[status.run][0]
                lines.append(_render(status, start, now - at, live=live))
            text = "\n".join(lines)
            # Up to the first line of the last drawing, and erase from there.
            if live or _counts(text) != _counts(said):
                print((f"\x1b[{drawn}F\x1b[J" if drawn else "") + text, flush=True)
            said = text
            drawn = text.count("\n") + 1 if live else 0
        if statuses and all(map(is_done, statuses)):
            return
        await asyncio.sleep(every_s)


async def written(bus: Bus, config: Config) -> None:
    """Wait until a sink that writes to our folder has everything that is delivered now; not for ever."""
    cuts = config.samples_dir() / "_cuts"
    newest = await bus.last("sample.*.*.*")
    deadline = time.monotonic() + 2 * config.sink.max_wait_s + 5
    while newest is not None and cuts.is_dir() and time.monotonic() < deadline:
        if _cut_up_to(cuts) >= newest.seq:
            return
        await asyncio.sleep(0.2)


def _cut_up_to(cuts: Path) -> int:
    from msgspec import json

    from rollyard.stages.cuts import Cut

    markers = sorted(cuts.glob("*.json"), key=lambda path: int(path.stem))
    return json.decode(markers[-1].read_bytes(), type=Cut).last if markers else 0


def is_done(status: RunStatus) -> bool:
    """Whether everything that was submitted is delivered."""
    return status.rollouts > 0 and not status.tasks_waiting and status.tasks_closed == status.tasks


def _counts(text: str) -> str:
    """A plain progress line without its rates: what has to change for another line to be worth printing."""
    return "\n".join(line.partition(" rollouts/s")[0].rpartition(";")[0] for line in text.splitlines())


def _render(status: RunStatus, before: RunStatus | None, elapsed_s: float, *, live: bool) -> str:
    from rollyard.pipeline.progress import render_status

    return render_status(status, before, elapsed_s, shutil.get_terminal_size().columns if live else None)


def run_cancel(args: argparse.Namespace) -> int:
    """Write the cancel; the roles do the rest."""
    return run_async(_cancel(args, config_of(args)))


async def _check_task(bus: Bus, run: str, task_id: str, index: int | None) -> None:
    """Raises ConfigError for a rollout that the run does not have; a task that waits for admit is not known yet."""
    from rollyard.pipeline.taskstore import TaskStore
    from rollyard.schemas import subjects
    from rollyard.schemas.errors import ConfigError

    found = await TaskStore(bus).progress.get(subjects.task_key(run, task_id))
    waiting = await bus.subjects(subjects.TASKS, subjects.task_subject(run))
    if found is None and not waiting:
        raise ConfigError(f"run {run!r} has no task {task_id!r}", hint="`rollyard samples ls` shows ids")
    if found is not None and index is not None and not 0 <= index < found[0].group_size:
        raise ConfigError(f"task {task_id!r} has rollouts 0 to {found[0].group_size - 1}, not {index}")


async def _cancel(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.client import Client
    from rollyard.schemas.errors import ConfigError

    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        if args.index is not None and args.task is None:
            raise ConfigError("--index needs --task", hint="say which task's rollout is to end")
        if args.task is not None:
            await _check_task(bus, args.run_name, args.task, args.index)
        await Client(bus, args.run_name).cancel(args.task, args.index, reason=args.reason)
    print("Cancelled. Rollouts that had not ended are delivered with status `cancelled`.")
    return 0
