"""`rollyard sandbox`: which backends there are, what each can do, and whether one does what it must."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from rollyard.cli.common import Commands, base_config, command, configure_logging, json_flag, run_async, table, to_json

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.stages.conformance.behaviour import Verdict


def add(commands: Commands) -> None:
    """The commands of this file."""
    sandbox = commands.add_parser("sandbox", help="list sandbox backends, or check that one does what it must")
    actions = sandbox.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listed = command(actions, "ls", run_ls, "list the backends, what each can do, and how far it was tried")
    json_flag(listed)
    check = command(actions, "check", run_check, "try every behaviour of the conformance kit on a backend")
    check.add_argument("backend", metavar="NAME", help="a backend, or package.module:Class")
    check.add_argument("--image", default="", help="image of its sandboxes (default: the backend's own)")
    check.add_argument(
        "--only", action="append", default=[], metavar="X", help="a group or one behaviour, group.name; may be repeated"
    )
    json_flag(check)


def run_ls(args: argparse.Namespace) -> int:
    """Print what the classes say of themselves; nothing is started."""
    from rollyard.stages.conformance.overview import HEADER, overview, row

    known = overview()
    if args.json:
        print(to_json([{"name": name, "capabilities": can} for name, can in known.items()]))
    else:
        print(table(HEADER, [row(name, can) for name, can in known.items()]))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Exit code 1 when a behaviour failed."""
    from msgspec import structs

    from rollyard.stages.conformance.catalogue import chosen
    from rollyard.stages.conformance.check import check
    from rollyard.stages.conformance.counterparts import counterparts

    behaviours = chosen(args.only)
    config = base_config(args)
    configure_logging(structs.replace(config.log, level="error"))
    width = max(len(behaviour.id) for behaviour in behaviours)

    def report(verdict: Verdict) -> None:
        if args.json:
            return
        reason = f"  {verdict.reason}" if verdict.reason else ""
        line = f"{verdict.outcome:12}{verdict.behaviour.id:{width}}  {verdict.took_s:6.2f} s{reason}"
        print(line.replace("\n", " "), flush=True)

    async def main() -> int:
        async with counterparts(args.backend, args.image, _settings(config, args.backend)) as setting:
            verdicts = await check(setting, behaviours, report)
        return _conclude(verdicts, args.json)

    return run_async(main())


def _settings(config: Config, backend: str) -> dict[str, Any]:
    """The user's, with the image store that the workers use: the kit's own root has none."""
    store = {"images": str(config.sandboxes_dir().absolute().parent / "images")} if backend == "bubblewrap" else {}
    return store | config.backends.get(backend, {})


def _conclude(verdicts: list[Verdict], as_json: bool) -> int:
    counts = {
        outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in ("pass", "fail", "not offered")
    }
    if as_json:
        print(
            to_json(
                [
                    {
                        "behaviour": verdict.behaviour.id,
                        "shows": verdict.behaviour.shows,
                        "outcome": verdict.outcome,
                        "reason": verdict.reason,
                        "took_s": round(verdict.took_s, 3),
                    }
                    for verdict in verdicts
                ]
            )
        )
    else:
        print(
            f"\n{counts['pass']} passed, {counts['fail']} failed, {counts['not offered']} not offered", file=sys.stderr
        )
    return 1 if counts["fail"] else 0
