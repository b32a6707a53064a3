"""`rollyard agent`: bundles of agents, which sandboxes of this machine use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, command, json_flag, table, to_json

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.doctor import Finding

ALL = "all"
MEGABYTE = 1_000_000


def add(commands: Commands) -> None:
    """The commands of this file."""
    agent = command(commands, "agent", run_ls, "look after the agent bundles that sandboxes use")
    kinds = agent.add_subparsers(title="what", metavar="WHAT", required=True)
    json_flag(command(kinds, "ls", run_ls, "list them, and whether they are there"))
    bundle = command(kinds, "bundle", run_bundle, "make bundles, with locked versions")
    bundle.add_argument("names", nargs="+", metavar="NAME", help="as `ls` shows them, package.module:NAME, or all")
    bundle.add_argument("--again", action="store_true", help="make them anew though they are there")


def run_ls(args: argparse.Namespace) -> int:
    """List them."""
    from rollyard.harnesses.bundles.bundle import folder_of, known_bundles, read_record, recipe, state_of

    rows = []
    for name in known_bundles():
        made = recipe(name)
        record = read_record(folder_of(made))
        size = round(record.size_bytes / MEGABYTE) if record else None
        rows.append((name, made.version, state_of(made), size, str(folder_of(made))))
    names = ("bundle", "version", "state", "megabytes", "folder")
    print(to_json([dict(zip(names, row, strict=True)) for row in rows]) if args.json else table(names, rows))
    return 0


def run_bundle(args: argparse.Namespace) -> int:
    """Make bundles. One that cannot be made does not keep the others away."""
    import sys
    from functools import partial

    from rollyard.harnesses.bundles.build import build
    from rollyard.harnesses.bundles.bundle import folder_of, known_bundles, recipe
    from rollyard.schemas.errors import HarnessError

    code = 0
    for name in known_bundles() if ALL in args.names else args.names:
        try:
            made = recipe(name)
            record = build(made, partial(_say, name), again=args.again)
        except HarnessError as error:
            print(f"rollyard: {error}", file=sys.stderr)
            code = error.exit_code
            continue
        print(f"{name} {made.version}: {record.size_bytes / MEGABYTE:.0f} MB in {folder_of(made)}")
    return code


def _say(name: str, step: str) -> None:
    print(f"{name}: {step} ...", flush=True)


async def check(config: Config) -> Finding:
    """For doctor."""
    from rollyard.harnesses.bundles.bundle import bundles_folder, known_bundles, recipe, state_of
    from rollyard.pipeline.doctor import Finding

    states = {name: state_of(recipe(name)) for name in known_bundles()}
    lacking = [name for name, state in states.items() if state != "ready"]
    ready = [name for name in states if name not in lacking]
    found = f"{', '.join(ready) or 'none'} in {bundles_folder()}"
    if not lacking:
        return Finding(check="agent bundles", status="ok", found=found)
    found += "; not there: " + ", ".join(f"{name} ({states[name]})" for name in lacking)
    mend = f"for the agents that you use: rollyard agent bundle {lacking[0]}"
    return Finding(check="agent bundles", status="warn", found=found, mend=mend)
