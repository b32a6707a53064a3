"""`rollyard agents`: agents that need an environment of their own beside Rollyard's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, command, json_flag, table, to_json

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.doctor import Finding

AGENTS = ("mini_swe_agent",)


def add(commands: Commands) -> None:
    """The commands of this file."""
    agents = command(commands, "agents", run_ls, "look after agents that need an environment of their own")
    kinds = agents.add_subparsers(title="what", metavar="WHAT", required=True)
    json_flag(command(kinds, "ls", run_ls, "list them, and whether they are installed"))
    install = command(kinds, "install", run_install, "make the environment of one, with locked versions")
    install.add_argument("name", choices=AGENTS, metavar="NAME", help=f"one of {', '.join(AGENTS)}")


def run_ls(args: argparse.Namespace) -> int:
    """List them."""
    from rollyard.harnesses import mini_swe_agent

    rows = [("mini_swe_agent", mini_swe_agent.is_installed(), str(mini_swe_agent.tool_folder()))]
    names = ("agent", "installed", "folder")
    print(to_json([dict(zip(names, row, strict=True)) for row in rows]) if args.json else table(names, rows))
    return 0


def run_install(args: argparse.Namespace) -> int:
    """Install one, unless it is there."""
    from rollyard.harnesses import mini_swe_agent

    folder = mini_swe_agent.tool_folder()
    if mini_swe_agent.is_installed():
        print(f"{args.name} is installed in {folder}.")
        return 0
    print(f"Installing {args.name} into {folder} ...", flush=True)
    mini_swe_agent.install()
    return 0


async def check(config: Config) -> Finding:
    """For doctor."""
    from rollyard.harnesses import mini_swe_agent
    from rollyard.pipeline.doctor import Finding

    folder = mini_swe_agent.tool_folder()
    if mini_swe_agent.is_installed():
        return Finding(check="mini-swe-agent", status="ok", found=str(folder))
    mend = "rollyard agents install mini_swe_agent"
    return Finding(check="mini-swe-agent", status="warn", found=f"not installed in {folder}", mend=mend)
