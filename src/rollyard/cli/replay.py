"""Samples made again from the log: as they were committed, or by another stitcher, policy or reward."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard.cli.common import (
    Commands,
    check_run,
    command,
    config_of,
    connected,
    json_flag,
    run_async,
    table,
    to_json,
)

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.log import LogSource
    from rollyard.pipeline.replay import Progress, ReplayReport
    from rollyard.pipeline.sample_diff import ChangeKind, Diff, SampleChange
    from rollyard.stages.reevaluation import Reevaluation, TaskOf
    from rollyard.stages.remake import Recipe
    from rollyard.stages.replay import RemakeReport
    from rollyard.stages.sample_folder import SampleFolder

PROGRESS_EVERY_S: Final = 5.0
EXAMPLES: Final = 5
SHOWN_MISMATCHES: Final = 20
CHANGES: Final[dict[ChangeKind, str]] = {
    "added": "samples added",
    "removed": "samples removed",
    "trained_more": "more tokens trained",
    "trained_less": "fewer tokens trained",
    "tokens": "other token ids",
    "reward": "other reward",
    "turn_rewards": "other turn rewards",
}


def add(commands: Commands) -> None:
    """The commands of this file."""
    replay = command(commands, "replay", run_replay, "rebuild samples from the log and compare them with the commits")
    replay.add_argument("--run", dest="run_name", required=True, metavar="RUN", help="name of the run")
    replay.add_argument("--from", dest="archive", type=Path, metavar="DIR", help="read an archive; needs no bus")
    replay.add_argument("--stitcher", metavar="V", help="make the samples with this version of the stitcher")
    replay.add_argument("--policy", type=Path, metavar="FILE", help="by this sample policy, TOML or JSON")
    replay.add_argument("--reward", type=Path, metavar="FILE", help="judged by this evaluation rule, TOML or JSON")
    replay.add_argument(
        "--recover", action="store_true", help="also make those of rollouts that aggregate had to give up"
    )
    replay.add_argument("--diff", action="store_true", help="show what changes against the committed samples")
    replay.add_argument("--out", type=Path, metavar="DIR", help="write the samples as Parquet files to a new folder")
    json_flag(replay)


def run_replay(args: argparse.Namespace) -> int:
    """Compare, or make anew; exit code 5 when the log does not reproduce what was committed."""
    from rollyard.schemas.errors import ConfigError

    config = config_of(args)
    recipe = recipe_of(args)
    if args.diff and not recipe.changes():
        raise ConfigError(
            "--diff has nothing to compare the committed samples with",
            hint="say what is to be another: --stitcher, --policy, --reward or --recover",
        )
    if recipe.changes() or args.out:
        return run_async(_remake(args, config, recipe))
    return run_async(_compare(args, config))


def recipe_of(args: argparse.Namespace) -> Recipe:
    """What the options ask for. Raises ConfigError."""
    from rollyard.pipeline.samplepolicy import read_policy
    from rollyard.pipeline.specfile import read_spec
    from rollyard.schemas.errors import ConfigError
    from rollyard.schemas.task import EvaluationSpec
    from rollyard.stages.remake import Recipe
    from rollyard.stages.stitching import STITCHERS

    if args.stitcher is not None and args.stitcher not in STITCHERS:
        raise ConfigError(f"--stitcher: there is no version {args.stitcher!r}", hint=f"here are {', '.join(STITCHERS)}")
    return Recipe(
        stitcher=args.stitcher or "",
        policy=read_policy(args.policy) if args.policy else None,
        reward=read_spec(args.reward, EvaluationSpec) if args.reward else None,
        recover=args.recover,
    )


@asynccontextmanager
async def _source(args: argparse.Namespace, config: Config) -> AsyncIterator[tuple[LogSource, TaskOf | None]]:
    """Where events come from, and tasks, which an archive does not hold."""
    from rollyard.pipeline.archive.reader import ArchiveLog
    from rollyard.pipeline.log import BusLog
    from rollyard.pipeline.taskstore import TaskStore
    from rollyard.stages.reevaluation import stored_tasks

    if args.archive is not None:
        yield ArchiveLog(args.archive), None
        return
    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        yield BusLog(bus), stored_tasks(TaskStore(bus))


async def _compare(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.replay import render_report
    from rollyard.schemas.errors import ReplayError
    from rollyard.stages.replay import replay_run

    async with _source(args, config) as (source, _):
        report = await replay_run(source, args.run_name, progress=_progress(args.run_name))
    _check_not_empty(args, report)
    print(to_json(report) if args.json else render_report(report))
    return 0 if report.ok else ReplayError.exit_code


async def _remake(args: argparse.Namespace, config: Config, recipe: Recipe) -> int:
    from rollyard.pipeline.sample_diff import Diff
    from rollyard.schemas.errors import EvaluationError, ReplayError
    from rollyard.stages.replay import remake_run

    diff = Diff(examples=EXAMPLES) if args.diff else None
    with _folder(args.out) as folder:
        async with _source(args, config) as (source, task_of):
            judge = judge_of(args, recipe, task_of)
            report = await remake_run(
                source,
                args.run_name,
                recipe,
                judge=judge,
                diff=diff,
                on_changes=_print_changes if args.diff and args.json else None,
                write=folder.add if folder else None,
                progress=_progress(args.run_name),
            )
        _check_not_empty(args, report)
        if folder:
            folder.finish({"run": args.run_name, "made_by": recipe, "report": report})
    if args.json:
        print(to_json(_plain(report, diff)))
    else:
        print("\n".join([*_summary(report), *(_diff_tables(diff) if diff else ()), *_written(args.out)]))
    if report.mismatches:
        return ReplayError.exit_code
    return EvaluationError.exit_code if report.not_judged and not report.judged else 0


@contextmanager
def _folder(path: Path | None) -> Iterator[SampleFolder | None]:
    if path is None:
        yield None
        return
    from rollyard.stages.sample_folder import SampleFolder

    with SampleFolder.new(path) as folder:
        yield folder


def judge_of(args: argparse.Namespace, recipe: Recipe, task_of: TaskOf | None) -> Reevaluation | None:
    """The rule of --reward. Raises ConfigError that names the file."""
    from rollyard.schemas.errors import ConfigError, TaskError
    from rollyard.stages.reevaluation import Reevaluation

    if recipe.reward is None:
        return None
    try:
        return Reevaluation(recipe.reward, task_of)
    except TaskError as error:
        raise ConfigError(f"{args.reward}: {error.message}", hint=error.hint) from error


def _progress(run: str) -> Progress:
    """Tells how far it is on standard error, every few seconds."""
    began = told = time.monotonic()

    def tell(rollouts: int, samples: int, size: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= PROGRESS_EVERY_S:
            told = now
            speed = f"{size / 1e6:.0f} MB of events, {size / 1e6 / (now - began):.0f} MB/s"
            print(f"{run}: {rollouts:,} rollouts, {samples:,} samples, {speed}", file=sys.stderr, flush=True)

    return tell


# --- what is printed ---


def _check_not_empty(args: argparse.Namespace, report: ReplayReport | RemakeReport) -> None:
    """Nothing reproduced is no proof. Raises ReplayError."""
    from rollyard.schemas.errors import ReplayError

    if not report.rollouts and not report.uncommitted:
        where = "The log" if args.archive is None else f"The archive {args.archive}"
        raise ReplayError(
            f"{where} holds no rollout of run {args.run_name!r}: it has just begun, or was purged",
            hint="--from DIR reads its archive" if args.archive is None else "`rollyard archive --verify` checks it",
        )


def _print_changes(changes: Sequence[SampleChange]) -> None:
    print("\n".join(map(to_json, changes)))


def _plain(report: RemakeReport, diff: Diff | None) -> object:
    """The report as JSON, with the sums of the diff: its changes have lines of their own."""
    from msgspec import structs

    found: dict[str, object] = structs.asdict(report)
    if diff:
        found["diff"] = {
            "rollouts": diff.rollouts,
            "changed": diff.changed,
            "before": diff.before,
            "after": diff.after,
            "kinds": diff.kinds,
        }
    return found


def _summary(report: RemakeReport) -> Iterator[str]:
    from rollyard.pipeline.replay import still_open

    yield from map(str, report.mismatches[:SHOWN_MISMATCHES])
    if (more := len(report.mismatches) - SHOWN_MISMATCHES) > 0:
        yield f"... and {more} more of these; --json shows all"
    made = report.made
    mean = made.mean_reward()
    rewards = f"{made.rewarded} have a reward" + (f", {mean:.3f} on average" if mean is not None else "")
    yield (
        f"{made.samples:,} samples with {made.trained_tokens:,} trained tokens, of {made.rollouts:,} rollouts; "
        f"{rewards}.{still_open(report.uncommitted)}"
    )
    if report.recovered:
        yield f"{report.recovered} rollouts that aggregate had given up are among them."
    if report.excluded:
        yield "Calls left out: " + ", ".join(f"{count} {reason}" for reason, count in sorted(report.excluded.items()))
    if report.not_judged:
        yield f"The rule failed for {sum(report.not_judged.values())} rollouts, which have no reward:"
        yield from (f"  {count} times: {reason}" for reason, count in report.not_judged.items())


def _diff_tables(diff: Diff) -> Iterator[str]:
    yield ""
    if not diff.changed:
        yield f"Nothing changes in {diff.rollouts} rollouts."
        return
    yield f"{diff.changed} of {diff.rollouts} rollouts change."
    sides = [
        (name, total.samples, total.trained_tokens, total.rewarded, total.mean_reward())
        for name, total in (("as committed", diff.before), ("anew", diff.after))
    ]
    yield table(("", "samples", "trained tokens", "rewards", "mean reward"), sides)
    yield ""
    kinds = [
        (words, diff.kinds[kind].samples, diff.kinds[kind].trained_tokens)
        for kind, words in CHANGES.items()
        if kind in diff.kinds
    ]
    yield table(("change", "samples", "trained tokens"), kinds)
    yield ""
    rows = [(words, *_example(change)) for kind, words in CHANGES.items() for change in diff.shown.get(kind, ())]
    yield table(("for example", "rollout", "branch", "tokens", "trained", "reward"), rows)
    if any(diff.kinds[kind].samples > len(shown) for kind, shown in diff.shown.items()):
        yield f"At most {EXAMPLES} of each; --json shows all."


def _example(change: SampleChange) -> tuple[str, ...]:
    def both(name: str) -> str:
        before, after = (getattr(side, name) if side else None for side in (change.before, change.after))
        return f"{_cell(before)} -> {_cell(after)}"

    return change.rollout_id, both("branch"), both("tokens"), both("trained_tokens"), both("reward")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _written(out: Path | None) -> Iterator[str]:
    if out is not None:
        yield f"Written to {out}, as Parquet."
