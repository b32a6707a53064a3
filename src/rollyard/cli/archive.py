"""The log of a run, kept for good as Parquet; and purged from the bus once that is verified."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
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
    to_json,
)

if TYPE_CHECKING:
    from rollyard.pipeline.archive.archiving import ArchiveReport, Plan
    from rollyard.pipeline.config import Config

PROGRESS_EVERY_S: Final = 5.0


def add(commands: Commands) -> None:
    """The commands of this file."""
    archive = command(commands, "archive", run_archive, "keep the log of a run as Parquet, and purge it from the bus")
    archive.add_argument("--run", dest="run_name", required=True, metavar="RUN", help="name of the run")
    archive.add_argument("--to", type=Path, metavar="DIR", help="the archive (default: archive in the data folder)")
    archive.add_argument("--verify", action="store_true", help="also read it back and compare it with the log")
    archive.add_argument(
        "--purge", action="store_true", help="also remove the run, which must be closed, from the log; verifies first"
    )
    archive.add_argument("--dry-run", action="store_true", help="change nothing, say what would be done")
    json_flag(archive)


def run_archive(args: argparse.Namespace) -> int:
    """Archive what is new; then verify and purge if asked to."""
    return run_async(_archive(args, config_of(args)))


async def _archive(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.archive.archiving import Plan, archive_run, preview

    plan = Plan(samples=config.samples_dir(), verify=args.verify, purge=args.purge)
    work = preview if args.dry_run else archive_run
    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        report = await work(bus, args.run_name, args.to or config.archive_dir(), plan, _teller(args.run_name))
    print(to_json(report) if args.json else "\n".join(_lines(report, plan)))
    return 0


def _teller(run: str) -> Callable[[str], None]:
    """Tells how far it is on standard error, every few seconds."""
    told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        if time.monotonic() - told >= PROGRESS_EVERY_S:
            told = time.monotonic()
            print(f"{run}: {line}", file=sys.stderr, flush=True)

    return tell


def _lines(report: ArchiveReport, plan: Plan) -> Iterator[str]:
    would = "would be " if report.dry_run else ""
    yield f"{report.new_events:,} new events {would}archived, {_size(report.new_bytes)} as they are logged."
    yield f"{report.folder}: {report.events:,} events in {report.files} files, {_size(report.file_bytes)}."
    if report.dry_run and not plan.purge:
        return
    if plan.verify or plan.purge:
        yield f"All of it {would or 'was '}compared with the log{'' if report.dry_run else ', and is equal'}."
    if not plan.purge:
        return
    if report.blocked:
        yield f"Nothing would be purged: {report.blocked}."
        return
    yield f"{report.purged_events:,} events {would}removed from the log."
    yield f"{report.removed_blobs:,} blobs that nothing refers to {would}removed, {_size(report.removed_blob_bytes)}."


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
