"""`rollyard files`: what is kept of rollouts beside their samples: logs, outputs, diffs, files that hooks added."""

from __future__ import annotations

import argparse
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
    table,
    to_json,
)

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.kept_files import KeptFile


def add(commands: Commands) -> None:
    """The commands of this file."""
    files = command(commands, "files", run_ls, "list and save the files that are kept of rollouts")
    kinds = files.add_subparsers(title="what", metavar="WHAT", required=True)
    ls = command(kinds, "ls", run_ls, "list them")
    save = command(kinds, "save", run_save, "write them into a folder")
    for one in (ls, save):
        one.add_argument(
            "rollout", metavar="ID", nargs="?", default="", help="rollouts whose id begins so (default: all)"
        )
        one.add_argument("--run", dest="run_name", metavar="RUN", required=True, help="the run")
    json_flag(ls)
    save.add_argument("--out", metavar="DIR", type=Path, required=True, help="gets ROLLOUT/attempt-N/NAME")


def run_ls(args: argparse.Namespace) -> int:
    """List them."""
    return run_async(_ls(args, config_of(args)))


def run_save(args: argparse.Namespace) -> int:
    """Write them."""
    return run_async(_save(args, config_of(args)))


async def _found(args: argparse.Namespace, config: Config) -> list[KeptFile]:
    from rollyard.pipeline.kept_files import kept_files

    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        return [kept async for kept in kept_files(bus, args.run_name, args.rollout)]


async def _ls(args: argparse.Namespace, config: Config) -> int:
    rows = [
        (
            kept.task_id,
            kept.rollout_id,
            kept.attempt,
            kept.artifact.name,
            kept.artifact.size_bytes,
            kept.artifact.truncated,
        )
        for kept in await _found(args, config)
    ]
    names = ("task", "rollout", "attempt", "name", "bytes", "truncated")
    if args.json:
        print(to_json([dict(zip(names, row, strict=True)) for row in rows]))
    else:
        print(table(names, rows) if rows else "No file is kept of such a rollout.")
    return 0


async def _save(args: argparse.Namespace, config: Config) -> int:
    import sys

    from rollyard.pipeline.blobs import BlobStore
    from rollyard.pipeline.kept_files import save
    from rollyard.schemas.errors import BlobError

    blobs, lost, saved = BlobStore(config.blobs_dir()), 0, 0
    for kept in await _found(args, config):
        try:
            save(kept, blobs, args.out)
        except BlobError as error:
            lost += 1
            print(f"rollyard: {kept.rollout_id}: {error}", file=sys.stderr)
        else:
            saved += 1
    print(f"{saved} files are in {args.out}.")
    return BlobError.exit_code if lost else 0
