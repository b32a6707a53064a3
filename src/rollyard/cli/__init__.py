"""The command line. Each group of commands is a file here: `add(commands)` for the arguments, functions that run them.

Heavy imports stand inside the functions that need them, so that `rollyard --help` is instant. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from rollyard.cli import (
    agent,
    alarms,
    archive,
    client,
    demo,
    doctor,
    files,
    image,
    inspect,
    llm,
    relay,
    replay,
    rollouts,
    samples,
    sandbox,
    services,
    tasks,
    up,
)
from rollyard.cli.common import INTERRUPTED
from rollyard.schemas.errors import RollyardError

DEBUG_ENV = "ROLLYARD_DEBUG"
PASSED_ON = {"scripted-llm": "rollyard.gateway.scripted_llm", "local-model": "rollyard.gateway.local_model"}
"""Commands that are programs of their own: their `main` gets the arguments."""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="rollyard",
        # One line for each command.
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        description="Rollouts of LLM agents as a service: tasks in, training samples out.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, configuration or task, 3 something is missing on this "
        "machine, 4 the bus cannot be reached or refuses, 5 replay differs, 130 interrupted.",
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for group in (
        demo,
        up,
        services,
        relay,
        client,
        alarms,
        llm,
        tasks,
        rollouts,
        samples,
        files,
        replay,
        archive,
        inspect,
        agent,
        sandbox,
        image,
        doctor,
    ):
        group.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Users see one line for an error, never a traceback."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in PASSED_ON:
        code = import_module(PASSED_ON[given[0]]).main(given[1:])
        return int(code)
    arguments = parser().parse_args(given)
    if arguments.version:
        from rollyard import __version__

        print(f"rollyard {__version__}")
        return 0
    if not hasattr(arguments, "run"):
        parser().print_help()
        return 2
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output, for example `head`, has gone. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - the outermost boundary: an exception becomes a line and an exit code
        return _tell(error)


def _tell(error: BaseException) -> int:
    from rollyard.pipeline.supervisor import first_error

    if isinstance(error, BaseExceptionGroup):
        error = first_error(error)
    if os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    if isinstance(error, RollyardError):
        print(f"rollyard: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"rollyard: internal error: {type(error).__name__}: {error}"
        f" (this is a bug: run it again with {DEBUG_ENV}=1 and report what it prints)",
        file=sys.stderr,
    )
    return 1
