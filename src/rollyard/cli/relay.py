"""`rollyard relay`: the way of this machine's sandboxes to the gateways."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, command, config_of, configure_logging, serve

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.doctor import Finding


def add(commands: Commands) -> None:
    """The command of this file."""
    relay = command(commands, "relay", run_relay, "carry connections of this machine's sandboxes to the gateways")
    relay.add_argument(
        "--idle-s", type=_seconds, metavar="S", help="end when nobody had a use for it for so long (default: never)"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def run_relay(args: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    from rollyard.gateway.relay.service import serve_relay

    config = config_of(args)
    configure_logging(config.log)
    return serve(lambda stop: serve_relay(config, stop, args.idle_s))


async def check(config: Config) -> Finding:
    """Where a sandbox backend needs it: a relay of this machine that knows a gateway."""
    import asyncio

    from rollyard.gateway.relay.control import Request, ask
    from rollyard.pipeline.doctor import Finding
    from rollyard.pipeline.relay import needs_relay
    from rollyard.schemas.errors import SandboxError

    if not needs_relay(config):
        found = f"not needed by the sandbox backends {', '.join(config.worker.backends)}"
        return Finding(check="relay", status="ok", found=found)
    try:
        answer = await asyncio.to_thread(ask, config.relay_dir(), Request(do="hello"))
    except SandboxError as error:
        return Finding(check="relay", status="warn", found=error.message, mend=error.hint)
    if not answer.gateways:
        found = "; ".join(answer.refused) or "it answers, and knows no gateway"
        return Finding(check="relay", status="warn", found=found, mend="start `rollyard gateway`")
    found = f"{config.relay_dir()}, {answer.doors} doors, gateways at {', '.join(answer.gateways)}"
    return Finding(check="relay", status="ok", found=found)
