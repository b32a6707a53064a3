"""Alarms that the controller raised about runs."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, check_run, command, config_of, connected, json_flag, run_async, to_json

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config


def add(commands: Commands) -> None:
    """The command of this file."""
    alarms = command(commands, "alarms", run_alarms, "show what is wrong with runs, and what to do about it")
    alarms.add_argument("--run", dest="run_name", metavar="RUN", help="only of this run")
    json_flag(alarms)


def run_alarms(args: argparse.Namespace) -> int:
    """Show alarms, oldest first."""
    return run_async(_alarms(args, config_of(args)))


async def _alarms(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.alarms import alarms

    async with connected(config) as bus:
        if args.run_name:
            await check_run(bus, args.run_name)
        found = [alarm async for alarm in alarms(bus, args.run_name)]
    if args.json:
        for alarm in found:
            print(to_json(alarm))
        return 0
    if not found:
        print(f"There are no alarms{f' of run {args.run_name}' if args.run_name else ''}.")
    for alarm in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alarm.at_ms / 1000))
        print(f"{when}  {alarm.run}  {alarm.kind}: {alarm.message}")
        print(f"{'':{len(when)}}  {alarm.hint}")
    return 0
