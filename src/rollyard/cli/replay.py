"""Samples made again from the log."""

from __future__ import annotations

import argparse
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
    from rollyard.pipeline.config import Config


def add(commands: Commands) -> None:
    """The commands of this file."""
    replay = command(commands, "replay", run_replay, "rebuild samples from the log and compare them with the commits")
    replay.add_argument("--run", dest="run_name", required=True, metavar="RUN", help="name of the run")
    json_flag(replay)


def run_replay(args: argparse.Namespace) -> int:
    """Compare; exit code 5 when a sample differs."""
    return run_async(_replay(args, config_of(args)))


async def _replay(args: argparse.Namespace, config: Config) -> int:
    from rollyard.schemas.errors import ReplayError
    from rollyard.stages.replay import replay_run

    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        report = await replay_run(bus, args.run_name)
    if args.json:
        print(to_json(report))
    else:
        for one in report.mismatches:
            print(f"{one.problem}: sample {one.sample_id or '?'} of rollout {one.rollout_id} {one.detail}".rstrip())
        open_still = f" {report.uncommitted} rollouts are not at their end yet." if report.uncommitted else ""
        print(
            f"{report.equal} of {report.samples} samples of {report.rollouts} rollouts equal their commits.{open_still}"
        )
    return 0 if report.ok else ReplayError.exit_code
