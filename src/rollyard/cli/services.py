"""The long-running processes: worker, gateway, controller, sink, scripted-llm, local-model."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, command, config_of, configure_logging, connected, run_async, serve

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config

STAGES = ("admit", "init", "run", "eval", "aggregate")


def add(commands: Commands) -> None:
    """The commands of this file."""
    worker = command(commands, "worker", run_worker, "work on one or several stages")
    worker.add_argument("--stages", type=_stages, metavar="A,B", help=f"any of {','.join(STAGES)}")
    worker.add_argument("--slots", type=_positive, help="messages of each stage worked on at a time")
    gateway = command(commands, "gateway", run_gateway, "serve agents and log their model calls")
    gateway.add_argument("--port", type=port_number, help="port to listen on")
    controls = "close groups, honour cancels, move work away from dead places, raise alarms"
    command(commands, "controller", run_controller, controls)
    sink = command(commands, "sink", run_sink, "write the sample stream to Parquet files")
    sink.add_argument("--skip-gap", action="store_true", help="go on after deliveries that were trimmed before")
    # These two read their own arguments: see PASSED_ON in __init__.py.
    commands.add_parser("scripted-llm", help="serve a scripted policy as a vLLM server would, for tests")
    commands.add_parser("local-model", help="serve the small local model with llama.cpp")


def _stages(text: str) -> list[str]:
    stages = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(STAGES)}, separated by commas")
    return stages


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def port_number(text: str) -> int:
    """An argument that is a TCP port."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def run_worker(args: argparse.Namespace) -> int:
    """Work until SIGTERM."""
    from rollyard.stages.worker import run_worker as work

    config = config_of(args)
    configure_logging(config.log)
    stages, slots = args.stages or list(config.worker.stages), args.slots or config.worker.slots
    return serve(lambda stop: work(config, stages, slots, stop))


def run_gateway(args: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    from msgspec import structs

    from rollyard.gateway.service import serve_gateway

    config = config_of(args)
    configure_logging(config.log)
    if args.port is not None:
        config = structs.replace(config, gateway=structs.replace(config.gateway, port=args.port))
    return serve(lambda stop: serve_gateway(config, stop))


def run_controller(args: argparse.Namespace) -> int:
    """Run until SIGTERM."""
    config = config_of(args)
    configure_logging(config.log)
    return serve(lambda stop: _control(config, stop))


async def _control(config: Config, stop: asyncio.Event) -> None:
    from rollyard.pipeline.controller import run_controller as control
    from rollyard.pipeline.streams import ensure

    async with connected(config, "controller", wait_s=60.0) as bus:
        await ensure(bus, config.limits)
        await control(bus, stop, config)


def run_sink(args: argparse.Namespace) -> int:
    """Write until SIGTERM."""
    from rollyard.stages.sink import run_sink as write

    config = config_of(args)
    configure_logging(config.log)
    return run_async(write(config, skip_gap=args.skip_gap))
