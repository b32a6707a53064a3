"""What several commands share: the arguments that name an installation, its configuration, logging, output."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rollyard.pipeline.bus import Bus
    from rollyard.pipeline.config import Config, LogConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run = Callable[[argparse.Namespace], int]
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def command(
    commands: Commands, name: str, run: Run, help_text: str, data: str = ".rollyard"
) -> argparse.ArgumentParser:
    """A sub-command with the arguments that every command has. `data` is what its help calls the default folder."""
    made = commands.add_parser(name, help=help_text, description=help_text[:1].upper() + help_text[1:] + ".")
    made.add_argument("--config", metavar="FILE", type=Path, help="the TOML configuration (default: rollyard.toml)")
    made.add_argument("--data", metavar="DIR", type=Path, help=f"the data folder (default: {data})")
    made.set_defaults(run=run)
    return made


def json_flag(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def base_config(args: argparse.Namespace) -> Config:
    """The user's own configuration, with --data over it."""
    from msgspec import structs

    from rollyard.pipeline.config import load_config

    config = load_config(args.config)
    if args.data is None:
        return config
    return structs.replace(config, store=structs.replace(config.store, data=str(args.data)))


def config_of(args: argparse.Namespace) -> Config:
    """The configuration of the installation that a command talks to: see `find_config`."""
    from msgspec import structs

    from rollyard.pipeline.datafolder import find_config

    config, _ = find_config(args.config, args.data)
    configure_logging(structs.replace(config.log, level="warning"))
    return config


def configure_logging(config: LogConfig) -> None:
    """Send structlog to standard error: key=value on a terminal, else JSON."""
    import structlog

    as_text = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if as_text else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if as_text else [structlog.processors.dict_tracebacks]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def run_async(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on uvloop and return its exit code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def serve(work: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a service until it ends or SIGTERM or SIGINT sets its event. A second signal ends the process at once."""

    async def main() -> int:
        from rollyard.pipeline.supervisor import stop_on_signals

        stop = asyncio.Event()
        with stop_on_signals(stop.set, lambda: os._exit(INTERRUPTED)):
            await work(stop)
        return 0

    return run_async(main())


@asynccontextmanager
async def connected(config: Config, name: str = "cli", *, wait_s: float = 3.0) -> AsyncIterator[Bus]:
    """A connection for one command. Raises BusError when there is no server."""
    from rollyard.pipeline.blobs import BlobStore
    from rollyard.pipeline.bus import Bus

    async with Bus.connect(config.nats.url, name=name, blobs=BlobStore(config.blobs_dir()), wait_s=wait_s) as bus:
        yield bus


async def check_run(bus: Bus, name: str) -> None:
    """Raise ConfigError when no run has that name."""
    from rollyard.pipeline.kv import Bucket
    from rollyard.schemas import subjects
    from rollyard.schemas.errors import ConfigError
    from rollyard.schemas.fleet import Run

    try:
        found = await Bucket[Run](bus, subjects.RUNS, Run).get(subjects.token(name))
    except ValueError as error:
        raise ConfigError(f"--run: {error}", hint="give the name that you submitted under") from error
    if found is None:
        raise ConfigError(f"there is no run {name!r}", hint="`rollyard status` lists the runs")


def program() -> str:
    """How the user can call this program from here."""
    if shutil.which("rollyard"):
        return "rollyard"
    script = Path(sys.executable).with_name("rollyard")
    if not script.exists():
        return f"{sys.executable} -m rollyard"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain text in columns; numbers stand to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        parts = [
            value.rjust(width) if at_right else value.ljust(width)
            for value, width, at_right in zip(values, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(header)), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value).replace("\r", "\\r").replace("\n", "\\n")


def to_json(value: Any) -> str:
    """One line of JSON of plain values or records; packed arrays become lists."""
    import msgspec

    from rollyard.schemas import packed

    return msgspec.json.encode(value, enc_hook=packed.to_json).decode()
