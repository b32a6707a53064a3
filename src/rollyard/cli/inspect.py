"""Looking at what there is: dead letters, schemas, the configuration."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from rollyard.cli.common import (
    Commands,
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


def add(commands: Commands) -> None:
    """The commands of this file."""
    _add_dead(commands)
    schema = command(commands, "schema", run_schema, "print the JSON Schema of a record")
    schema.add_argument("name", metavar="NAME", nargs="?", help="name of a record (default: list the names)")
    config = command(commands, "config", run_config_show, "print the configuration")
    shows = config.add_subparsers(title="what", metavar="WHAT", required=True)
    json_flag(command(shows, "show", run_config_show, "print the configuration in effect, as TOML"))
    command(shows, "reference", run_config_reference, "print every key with its default, as Markdown")


def _add_dead(commands: Commands) -> None:
    dead = command(commands, "dead", run_dead_ls, "look at messages that could not be worked on")
    kinds = dead.add_subparsers(title="what", metavar="WHAT", required=True)
    ls = command(kinds, "ls", run_dead_ls, "list them")
    ls.add_argument("--run", dest="run_name", metavar="RUN", help="only of this run")
    json_flag(ls)
    show = command(kinds, "show", run_dead_show, "show one with its body")
    show.add_argument("seq", type=int, metavar="SEQ", help="its number, from `dead ls`")
    json_flag(show)


def run_schema(args: argparse.Namespace) -> int:
    """Print a schema, or the names."""
    from rollyard.schemas.catalogue import RECORDS, json_schema

    if args.name is None:
        print("\n".join(sorted(RECORDS)))
    else:
        print(json.dumps(json_schema(args.name), indent=2))
    return 0


def run_config_show(args: argparse.Namespace) -> int:
    """Print the configuration in effect. It holds no secrets."""
    from rollyard.pipeline.config import to_toml

    config = config_of(args)
    print(to_json(config) if args.json else to_toml(config))
    return 0


def run_config_reference(args: argparse.Namespace) -> int:
    """Print the tables of docs/configuration.md."""
    from rollyard.pipeline.config import reference

    print(reference())
    return 0


def run_dead_ls(args: argparse.Namespace) -> int:
    """List dead letters."""
    return run_async(_dead_ls(args, config_of(args)))


async def _dead_ls(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.dead import letters

    async with connected(config) as bus:
        rows = [(seq, letter) async for seq, letter in letters(bus, args.run_name)]
    if args.json:
        for seq, letter in rows:
            print(to_json({"seq": seq, "letter": letter}))
        return 0
    if not rows:
        print("There are no dead letters.")
        return 0
    shown = [
        (seq, _when(letter.at_ms), letter.stage, letter.run, letter.rollout_id, letter.reason) for seq, letter in rows
    ]
    print(table(("seq", "when", "stage", "run", "rollout", "reason"), shown))
    return 0


def run_dead_show(args: argparse.Namespace) -> int:
    """Show one dead letter."""
    return run_async(_dead_show(args, config_of(args)))


async def _dead_show(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.dead import letter_at
    from rollyard.schemas.errors import ConfigError

    async with connected(config) as bus:
        letter = await letter_at(bus, args.seq)
    if letter is None:
        raise ConfigError(f"there is no dead letter {args.seq}", hint="`rollyard dead ls` lists them")
    if args.json:
        print(to_json(letter))
        return 0
    for name in ("stage", "run", "rollout_id", "subject", "reason"):
        print(f"{name:11}{getattr(letter, name)}")
    print(f"{'when':11}{_when(letter.at_ms)}\n\n{letter.body.decode(errors='backslashreplace')}")
    return 0


def _when(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000)) if at_ms else ""
