"""Starts Hermes with a prompt from a file: one word of a command line has at most 128 KiB.

usage: hermes_start.py PROMPT_FILE [FLAG ...]
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run Hermes as its own program would; returns its exit status."""
    with open(sys.argv[1], encoding="utf-8", newline="") as file:  # noqa: PTH123 - pathlib takes long to import
        prompt = file.read()
    sys.argv = ["hermes", f"--oneshot={prompt}", *sys.argv[2:]]
    from hermes_cli.main import main as hermes  # type: ignore[import-not-found]  # noqa: PLC0415 - of the bundle

    return int(hermes() or 0)


if __name__ == "__main__":
    sys.exit(main())
